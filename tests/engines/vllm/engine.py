"""Run one of the drivers of this folder and return what it printed."""

from __future__ import annotations

from collections.abc import Mapping

from tests.engines import drivers
from tests.engines.drivers import ROOT, Run, preload

__all__ = ["ROOT", "Run", "environment", "run"]

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}

preload("tests.engines.libraries")


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any setting of ours, quiet and offline, plus `extra`."""
    return drivers.environment(QUIET | dict(extra))


def run(
    driver: str,
    *arguments: str,
    timeout_s: float = 400,
    stdin: str = "",
    new_interpreter: bool = False,
    **settings: str,
) -> Run:
    """Run `tests.engines.vllm.DRIVER`; keyword arguments are environment variables."""
    return drivers.run_module(
        f"tests.engines.vllm.{driver}",
        *arguments,
        variables=environment(settings),
        timeout_s=timeout_s,
        stdin=stdin,
        new_interpreter=new_interpreter,
    )
