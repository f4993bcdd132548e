"""From `new-chip` to green conformance and an answering vLLM, as a chip vendor would do it; prints wall time and lines.

python scripts/new_chip_walkthrough.py        # in an environment with vLLM (make -s python ENGINE=vllm)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from baige_device.cli.demo import MODEL_NAME, SERVER_ENVIRONMENT, Engine, server_arguments
from baige_device.cli.demo_model import default_cache_dir, prepare_smollm2
from baige_device.cli.demo_server import DemoServer, free_port
from baige_device.cli.new_chip import scaffold

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "newchip"
MOST_LINES = 300


def install(distribution: Path, site: Path) -> None:
    """Build the distribution and install it beside the environment, not into it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(distribution)], check=True)


def environment(name: str, site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), f"{name.upper()}_SIMULATE": "1"}


def conformance(name: str, site: Path, report: Path) -> None:
    """Run the shipped kit; every offered op must pass."""
    command = [sys.executable, "-m", "baige_device.cli", "conformance", "--backend", name, "--seed", "20261129"]
    subprocess.run([*command, "--measure", "--report", str(report)], check=True, env=environment(name, site))


def answer(name: str, site: Path, log: Path) -> dict[str, int]:
    """Start vLLM on the chip with the reference for what the chip lacks; returns the calls of the chip's own ops."""
    port, metrics_port = free_port(), free_port()
    settings = {"BAIGE_BACKEND": name, "BAIGE_FALLBACK": "reference", "BAIGE_METRICS_PORT": str(metrics_port)}
    model = prepare_smollm2(default_cache_dir())
    variables = {**environment(name, site), **SERVER_ENVIRONMENT, **settings}
    with DemoServer(server_arguments(Engine.vllm, model, port), variables, port, log) as server:
        server.wait_until_healthy(300)
        print(server.activation_line())
        print("answer:", "".join(server.ask("What is the capital of France?", MODEL_NAME, 24)))
        return {op: count for op, count in server.op_calls(metrics_port, name).items() if count}


def lines(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    return sum(path.read_text().count("\n") for path in files)


def main() -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        scaffold("tally", root / "baige-tally")
        install(root / "baige-tally", root / "tally-site")
        conformance("tally", root / "tally-site", root / "tally.md")
        print(
            f"scaffold: {lines(root / 'baige-tally')} lines, conformance green after {time.monotonic() - started:.0f} s"
        )
        install(EXAMPLE, root / "abacus-site")
        conformance("abacus", root / "abacus-site", root / "abacus.md")
        calls = answer("abacus", root / "abacus-site", root / "vllm.log")
        print((root / "abacus.md").read_text())
    count, seconds = lines(EXAMPLE), time.monotonic() - started
    print(f"examples/newchip: {count} lines; new-chip to an answering vLLM in {seconds:.0f} s; its calls: {calls}")
    if count > MOST_LINES or not calls.get("kv_write"):
        raise SystemExit(f"expected at most {MOST_LINES} lines and kv_write on the chip, got {count} lines and {calls}")


if __name__ == "__main__":
    main()
