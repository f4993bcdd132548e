"""Build (or find) a test environment and print its interpreter's path on stdout.

    python3 scripts/build_env.py unit|vllm|sglang

Two layers:

* base: everything pinned in envs/ENGINE.txt, immutable, shared by all checkouts:
  ``${BAIGE_CACHE:-~/.cache/baige-device}/envs/ENGINE-HASH``. It counts only with its ``.complete`` file, written last.
* overlay: ``.envs/ENGINE`` in the checkout, a pip-less venv that sees the base and holds this checkout as an editable
  install. An install and not PYTHONPATH, because the engines discover plugins through entry points, also in the
  processes that they spawn.

Only the standard library is used. Progress goes to stderr. Exit code 1: a step failed (its log's tail is shown).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ENGINES = ("unit", "vllm", "sglang")
PYTHONS = ((3, 11), (3, 12), (3, 13))  # versions for which the pinned lists have wheels
ROOT = Path(__file__).resolve().parent.parent
OVERLAY_FORMAT = "1"  # raise it when an overlay is made differently
HEARTBEAT_S = 30.0
LOG_TAIL_LINES = 30


class BuildError(Exception):
    """A step failed; the message is ready to be shown."""


def cache_folder() -> Path:
    """Where environments are kept; `BAIGE_CACHE` also serves users without a home directory."""
    if named := os.environ.get("BAIGE_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "baige-device"
    except RuntimeError as error:
        raise BuildError("this user has no home directory: set BAIGE_CACHE") from error


def say(text: str) -> None:
    print(f"build_env: {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------- pinned lists


def read_pins(path: Path) -> dict[str, list[str]]:
    """Sections of a pinned list (the format is described at the top of envs/unit.txt)."""
    sections: dict[str, list[str]] = {"with-deps": [], "no-deps": [], "remove": []}
    current: list[str] | None = None
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        if line.startswith("["):
            current = sections.get(line.strip("[]"))
        elif current is None:
            raise BuildError(f"{path}:{number}: {line!r} is in no known section ({', '.join(sections)})")
        elif current is not sections["remove"] and "==" not in line:
            raise BuildError(f"{path}:{number}: {line!r} is not an exact pin (NAME==VERSION)")
        else:
            current.append(line)
        if current is None:
            raise BuildError(f"{path}:{number}: unknown section {line}; known: {', '.join(sections)}")
    return sections


def find_python() -> tuple[str, str]:
    """Interpreter to build with, and its version ``X.Y``: the running one, or another that the lists fit."""
    names = [sys.executable, *(f"python{major}.{minor}" for major, minor in PYTHONS)]
    for name in names:
        probe = [name, "-c", "import ensurepip, sys; print(*sys.version_info[:2], sep='.')"]
        try:
            found = subprocess.run(probe, capture_output=True, text=True, check=False)
        except OSError:
            continue
        version = found.stdout.strip()
        if found.returncode == 0 and version in [f"{a}.{b}" for a, b in PYTHONS]:
            return name, version
    wanted = ", ".join(f"{a}.{b}" for a, b in PYTHONS)
    raise BuildError(f"no usable Python found (tried {', '.join(names)}); need one of {wanted} with its venv module")


# ------------------------------------------------------------------------------------------------------- running a step


class Meter:
    """One step's progress on stderr: a bar that redraws itself on a terminal, else a line now and then.

    ``expected`` is the number of packages, 0 when it is not known.
    """

    def __init__(self, label: str, expected: int) -> None:
        self.label = label
        self.expected = expected
        self.start = self.spoke = time.monotonic()
        self.live = sys.stderr.isatty()
        if not self.live:
            say(f"{label} ...")

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start

    def update(self, done: int, doing: str) -> None:
        if self.live:
            text = f"{self.label} {self.bar(done)}{self.elapsed_s():4.0f} s {doing}"
            columns = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.spoke > HEARTBEAT_S:
            self.spoke = time.monotonic()
            known = f"/{self.expected}" if self.expected else ""
            say(f"{self.label}: {done}{known} packages, {self.elapsed_s():.0f} s")

    def bar(self, done: int, width: int = 24) -> str:
        if not self.expected:
            return ""
        full = width * min(done, self.expected) // self.expected
        return f"[{'#' * full}{'.' * (width - full)}] "

    def close(self, word: str) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr)
        say(f"{self.label}: {word} after {self.elapsed_s():.0f} s")


def run_step(label: str, command: list[str], log: Path, lock: int, expected: int = 0) -> None:
    """Run a command with its output in ``log``; raise BuildError with the log's tail when it fails."""
    meter = Meter(label, expected)
    with log.open("w") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=clean_environment(),
            pass_fds=(lock,),
        )
        try:
            while child.poll() is None:
                steps = [s for s in log.read_text(errors="replace").splitlines() if not s.startswith("WARNING")]
                doing = next((s.strip() for s in reversed(steps) if s.startswith(("Collecting", "Installing"))), "")
                meter.update(sum(s.startswith("Collecting") for s in steps), doing)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=0.2)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    meter.close("done" if child.returncode == 0 else "FAILED")
    if child.returncode != 0:
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise BuildError(
            "\n".join([f"{label} failed with exit code {child.returncode}; the last lines of its log:", *tail])
            + f"\nlog:     {log}\ncommand: {' '.join(command)}"
        )


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would leak another environment into this one."""
    leaks = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"}
    return {name: value for name, value in os.environ.items() if name not in leaks}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive file lock and give its descriptor.

    The kernel drops the lock with the last process that holds the descriptor. Steps inherit it, so that a step that
    outlives a killed build still keeps the next build out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


# ----------------------------------------------------------------------------------------------------------- two layers


def site_packages(env: Path, version: str) -> Path:
    return env / "lib" / f"python{version}" / "site-packages"


def build_base(engine: str) -> tuple[Path, str]:
    """The shared base environment of an engine, built if it is not there; returns it and its Python version."""
    python, version = find_python()
    pins = ROOT / "envs" / f"{engine}.txt"
    sections = read_pins(pins)
    digest = hashlib.sha256(repr((sections, version)).encode()).hexdigest()[:12]
    base = cache_folder() / "envs" / f"{engine}-{digest}"
    marker = base / ".complete"
    if marker.exists():
        return base, version
    with locked(base.with_suffix(".lock")) as lock:
        if not marker.exists():
            fill_base(base, python, sections, engine, lock)
            marker.write_text(f"{pins.name} on Python {version}\n")
    return base, version


def fill_base(base: Path, python: str, sections: dict[str, list[str]], engine: str, lock: int) -> None:
    # A venv cannot be moved, so it is built in place and anything unfinished is thrown away first.
    if base.exists():
        say(f"removing an unfinished build at {base}")
        shutil.rmtree(base)
    say(f"building environment {engine!r} in {base}")
    base.mkdir(parents=True)
    logs = base / "logs"
    logs.mkdir()
    run_step(f"{engine} 1/4 venv", [python, "-m", "venv", str(base)], logs / "1-venv.log", lock)
    pip = [str(base / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--progress-bar", "off"]
    first, rest, unwanted = sections["with-deps"], sections["no-deps"], sections["remove"]
    run_step(f"{engine} 2/4 {' '.join(first)}", [*install, *first], logs / "2-with-deps.log", lock)
    run_step(f"{engine} 3/4 packages", [*install, "--no-deps", *rest], logs / "3-no-deps.log", lock, len(rest))
    if unwanted:
        run_step(f"{engine} 4/4 clean-up", [*pip, "uninstall", "--yes", *unwanted], logs / "4-remove.log", lock)


def build_overlay(engine: str, base: Path, version: str) -> Path:
    """The checkout's own venv over ``base``; returns its interpreter. Brought up to date when the metadata change."""
    overlay = ROOT / ".envs" / engine
    metadata = [ROOT / "pyproject.toml", ROOT / "baige_device" / "_version.py", *sorted(ROOT.glob("*.pth"))]
    inputs = [OVERLAY_FORMAT, version, str(ROOT), *(path.read_text() for path in metadata)]
    key = f"{base} {hashlib.sha256(repr(inputs).encode()).hexdigest()}"
    marker = overlay / ".complete"
    if not marker.exists() or marker.read_text() != key:
        with locked(overlay.with_suffix(".lock")) as lock:
            if not marker.exists() or marker.read_text() != key:
                fill_overlay(overlay, base, version, engine, lock)
                marker.write_text(key)
    return overlay / "bin" / "python"


def fill_overlay(overlay: Path, base: Path, version: str, engine: str, lock: int) -> None:
    log = overlay.with_suffix(".log")
    marker = overlay / ".complete"
    # Over the same base only the editable install is renewed: a process may be running in this environment.
    if not (marker.exists() and marker.read_text().startswith(f"{base} ")):
        shutil.rmtree(overlay, ignore_errors=True)
        venv = [str(base / "bin" / "python"), "-m", "venv", "--without-pip", str(overlay)]
        run_step(f"{engine} checkout 1/2 venv", venv, log, lock)
        # addsitedir, not a bare path: the base's own .pth files run too. The name sorts before the editable install's.
        below = str(site_packages(base, version))
        own = site_packages(overlay, version)
        (own / "__base__.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        link_programs(base / "bin", overlay / "bin")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--editable"]
    install = [str(overlay / "bin" / "python"), "-m", "pip", "install", *options, str(ROOT)]
    run_step(f"{engine} checkout 2/2 editable install", install, log, lock)


def link_programs(source: Path, target: Path) -> None:
    """Put compiled programs of packages (ruff, ninja) beside the interpreter, where their packages look for them."""
    for program in filter(Path.is_file, source.iterdir()):
        with program.open("rb") as file:
            compiled = file.read(4) == b"\x7fELF"
        if compiled and not program.name.startswith("python"):
            (target / program.name).symlink_to(program)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in ENGINES:
        say(f"usage: python3 scripts/build_env.py {'|'.join(ENGINES)}")
        return 2
    engine = arguments[0]
    try:
        base, version = build_base(engine)
        interpreter = build_overlay(engine, base, version)
    except BuildError as error:
        say(str(error))
        return 1
    print(interpreter)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
