"""A host engine's OpenAI server as a child process: start, ask, read its metrics, stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["DemoServer", "ServerFailed", "free_port"]

_LOG_LINES = 30
_STOP_SECONDS = 60


class ServerFailed(Exception):
    """The server ended, did not start, or did not do what the demo shows; carries the end of its log."""

    def __init__(self, message: str, log: Path) -> None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""
        super().__init__(f"{message}\nlog: {log}\n{tail}")


def free_port() -> int:
    """A TCP port that is free on the loopback address now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DemoServer:
    """The child process, in a session of its own so that all its workers can be stopped together."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> None:
        self._command = [sys.executable, *arguments]
        self._environment = dict(environment)
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Poll `/health`; returns the seconds it took. Raises `ServerFailed` when the server ends or is too slow."""
        assert self._process is not None
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with status {self._process.returncode}", self._log)
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=2):
                    return time.monotonic() - started
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise ServerFailed(f"the server was not healthy after {timeout_s:.0f} s", self._log)

    def activation_line(self) -> str:
        """The line with which baige-device announced itself in the server's log, or an empty text."""
        found = re.search(r"baige-device active: .*", self._log.read_text(errors="replace"))
        return found.group(0) if found else ""

    def ask(self, question: str, model: str, max_tokens: int) -> Iterator[str]:
        """Stream the answer of `/v1/chat/completions`, greedily."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                yield from _pieces(answer)
        except (urllib.error.URLError, OSError) as error:
            raise ServerFailed(f"the question failed: {error}", self._log) from error

    def op_calls(self, metrics_port: int, backend: str = "") -> dict[str, int]:
        """Calls per op, read from the worker's Prometheus endpoint; `backend` keeps only the ops that it serves."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as page:
                text = page.read().decode()
        except (urllib.error.URLError, OSError) as error:
            raise ServerFailed(f"the worker serves no metrics: {error}", self._log) from error
        calls = re.findall(r'^baige_op_calls_total\{backend="(\w+)",op="(\w+)".*?\} (\S+)$', text, re.MULTILINE)
        return {op: int(float(count)) for name, op, count in calls if backend in ("", name)}

    def stop(self) -> bool:
        """Interrupt the server, wait for it, and end what is left of its session. Idempotent.

        False when it did not end by itself and was killed.
        """
        if self._process is None:
            return True
        process, self._process = self._process, None
        ended = True
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                ended = False
                process.kill()
                process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return ended


def _pieces(lines: Iterator[bytes]) -> Iterator[str]:
    for raw in lines:
        line = raw.decode().strip()
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            piece = choice.get("delta", {}).get("content")
            if piece:
                yield piece
