"""Run one of the drivers of this folder, or SGLang's server, and return what it printed."""

from __future__ import annotations

from collections.abc import Mapping

from tests.engines import drivers
from tests.engines.drivers import ROOT, Run, preload

__all__ = ["ROOT", "Run", "environment", "run"]

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}

preload("tests.engines.sglang.libraries")


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any setting of ours, quiet and offline, plus `extra`."""
    return drivers.environment(QUIET | dict(extra))


def run(driver: str, *arguments: str, timeout_s: float = 300, stdin: str = "", **settings: str) -> Run:
    """Run `tests.engines.sglang.DRIVER`; keyword arguments are environment variables."""
    return drivers.run_module(
        f"tests.engines.sglang.{driver}",
        *arguments,
        variables=environment(settings),
        timeout_s=timeout_s,
        stdin=stdin,
    )
