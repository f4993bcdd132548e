"""Run a module of the tests in a process of its own, and return what it printed.

After `preload` a run is a fork of a process that has imported an engine's libraries (`fork_server.py`); before it, and
where a test asks for one, it is a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Run", "environment", "preload", "run_module"]

ROOT = Path(__file__).resolve().parents[2]
START_S = 120


@dataclass(frozen=True)
class Run:
    """A finished driver: its exit status, the JSON of each line `ANSWER ...`, and everything that it printed."""

    status: int
    answers: list[dict[str, Any]]
    log: str

    @classmethod
    def of(cls, status: int, printed: str) -> Run:
        lines = printed.splitlines()
        answers = [json.loads(line[7:]) for line in lines if line.startswith("ANSWER ")]
        return cls(status, answers, "\n".join(line for line in lines if "server_args=" not in line))

    @property
    def answer(self) -> dict[str, Any]:
        assert self.status == 0, self.log[-6000:]
        assert len(self.answers) == 1, self.log[-6000:]
        return self.answers[0]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any setting of ours, plus `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BAIGE_") or key == "BAIGE_CACHE"}
    return kept | dict(extra)


def run_module(
    module: str,
    *arguments: str,
    variables: Mapping[str, str],
    timeout_s: float,
    stdin: str = "",
    new_interpreter: bool = False,
) -> Run:
    """Run `python -m MODULE ARGUMENTS` in an environment of `variables`.

    It leads a session of its own, since SGLang ends whole process groups when a worker fails. Raises
    subprocess.TimeoutExpired, after the process was killed.
    """
    if _server is not None and not new_interpreter:
        return _server.run(module, arguments, variables, stdin, timeout_s)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=dict(variables),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
        start_new_session=True,
    )
    return Run.of(done.returncode, done.stdout)


class _ForkServer:
    """The client's side; the server starts with the first run and ends with this process."""

    def __init__(self, libraries: str) -> None:
        self._libraries = libraries
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="baige-drivers-")
        atexit.register(self._stop)

    def run(
        self, module: str, arguments: tuple[str, ...], variables: Mapping[str, str], stdin: str, timeout_s: float
    ) -> Run:
        with (
            tempfile.NamedTemporaryFile("w", dir=self._folder) as given,
            tempfile.NamedTemporaryFile("r", dir=self._folder, errors="replace") as printed,
            self._connect() as connection,
        ):
            given.write(stdin)
            given.flush()
            request = {"module": module, "arguments": arguments, "environment": dict(variables)}
            files = {"stdin": given.name, "stdout": printed.name}
            connection.sendall(json.dumps(request | files).encode() + b"\n")
            replies = connection.makefile()
            process = int(replies.readline())
            try:
                connection.settimeout(timeout_s)
                status = int(replies.readline())
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired([module, *arguments], timeout_s, printed.read()) from error
                raise
            return Run.of(status, printed.read())

    def _connect(self) -> socket.socket:
        path = os.path.join(self._folder, "socket")
        with self._starting:
            if self._process is None:
                command = [sys.executable, "-m", "tests.engines.fork_server", self._libraries, path]
                self._process = subprocess.Popen(command, cwd=ROOT, env=environment({}), stdin=subprocess.PIPE)
                deadline = time.monotonic() + START_S
                while not os.path.exists(path):
                    assert self._process.poll() is None, f"the fork server of {self._libraries} ended"
                    assert time.monotonic() < deadline, f"the fork server of {self._libraries} does not listen"
                    time.sleep(0.02)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return connection

    def _stop(self) -> None:
        if self._process is not None:
            self._process.communicate()  # its stdin is closed
        for name in os.listdir(self._folder):
            os.unlink(os.path.join(self._folder, name))
        os.rmdir(self._folder)


_server: _ForkServer | None = None


def preload(libraries: str) -> None:
    """From now on run modules in forks of a process that has imported the module `libraries`."""
    global _server
    _server = _ForkServer(libraries)
