"""The conformance kit: does a backend do what the op contracts say?

A vendor subclasses `BackendConformance` in a pytest file, or runs `baige-device conformance --backend NAME`. Both run
the same matrix, from easy to hostile: float64 or byte-exact oracles, poisoned outputs, guarded buffers, inputs checked
to be unchanged. pytest is not needed for the command.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baige_device.testing.cases import Case, all_cases, rank_cases
    from baige_device.testing.measure import Measurement, measure
    from baige_device.testing.needs import NEED_KEYS
    from baige_device.testing.ranks import RankOptions, run_ranks
    from baige_device.testing.report import Report, make_report
    from baige_device.testing.runner import Outcome, Runner, open_backend
    from baige_device.testing.suite import BackendConformance

_EXPORTS = {
    "BackendConformance": "suite",
    "Case": "cases",
    "Measurement": "measure",
    "NEED_KEYS": "needs",
    "Outcome": "runner",
    "RankOptions": "ranks",
    "Report": "report",
    "Runner": "runner",
    "all_cases": "cases",
    "make_report": "report",
    "measure": "measure",
    "open_backend": "runner",
    "rank_cases": "cases",
    "run_ranks": "ranks",
}

__all__ = [
    "BackendConformance",
    "Case",
    "Measurement",
    "NEED_KEYS",
    "Outcome",
    "RankOptions",
    "Report",
    "Runner",
    "all_cases",
    "make_report",
    "measure",
    "open_backend",
    "rank_cases",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
