"""Run one of the drivers of this folder and return what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Run:
    """A finished driver."""

    status: int
    answers: list[dict[str, Any]]
    log: str

    @property
    def answer(self) -> dict[str, Any]:
        assert self.status == 0, self.log[-6000:]
        assert len(self.answers) == 1, self.log[-6000:]
        return self.answers[0]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any setting of ours, quiet and offline, plus `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BAIGE_") or key == "BAIGE_CACHE"}
    return kept | QUIET | dict(extra)


def run(driver: str, *arguments: str, timeout_s: float = 400, stdin: str | None = None, **settings: str) -> Run:
    """Run `tests.engines.vllm.DRIVER`; keyword arguments are environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engines.vllm.{driver}", *arguments],
        cwd=ROOT,
        env=environment(settings),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return Run(done.returncode, answers, done.stdout)
