"""Running the cases of a benchmark folder, and what is printed and written of them."""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer

from baige_device import __version__
from baige_device.cli.bench_case import BenchCase
from baige_device.cli.bench_timing import Limits, time_us

__all__ = ["Report", "Result", "collect", "environment", "print_row"]


@dataclass(frozen=True)
class Result:
    """One timed case."""

    op: str
    case: str
    us: float
    peers_us: dict[str, float]
    percent_of_limit: float
    limit: str
    tier: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "case": self.case,
            "us": round(self.us, 2),
            "peers_us": {name: round(us, 2) for name, us in self.peers_us.items()},
            "percent_of_limit": round(self.percent_of_limit, 1),
            "limit": self.limit,
            "tier": self.tier,
            "facts": self.facts,
        }


def collect(folder: Path, ops: list[str], match: str, limits: Limits) -> Iterator[Result]:
    """Verify and time every matching case of the folder's `bench_*.py`, in file order."""
    for path in sorted(folder.glob("bench_*.py")):
        module = _load(path)
        if ops and not set(ops) & set(module.OPS):
            continue
        for case in module.cases():
            if (not ops or case.op in ops) and match in case.case:
                yield _run(case, limits)


def _load(path: Path) -> ModuleType:
    """Import a benchmark file; its folder's parent is put on the path so that files can share helpers."""
    root = str(path.resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    name = f"baige_benchmarks_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _run(case: BenchCase, limits: Limits) -> Result:
    case.verify()
    for peer in case.peers:
        peer.verify()
    us = time_us(case.run, case.sets, capturable=case.capturable)
    peers = {peer.name: time_us(peer.run, case.sets, capturable=case.capturable) for peer in case.peers}
    return Result(
        case.op, case.case, us, peers, limits.share(case.limit, case.work, us), case.limit, case.tier, case.facts
    )


def print_row(result: Result) -> None:
    """One line: time, share of the limit, and how many times faster than each peer."""
    peers = "".join(f"  {name} {us:.1f} us ({us / result.us:.2f}x)" for name, us in result.peers_us.items())
    share = f"{result.percent_of_limit:5.1f} % of {result.limit}"
    typer.echo(f"{result.op:20s} {result.case:44s} {result.us:9.1f} us  {share}{peers}")


def environment() -> dict[str, Any]:
    """Card, versions and date of this run."""
    versions = {"baige-device": __version__, "torch": str(torch.__version__), "cuda": torch.version.cuda}
    spec = importlib.util.find_spec("triton")
    if spec is not None:
        import triton

        versions["triton"] = triton.__version__
    return {
        "card": torch.cuda.get_device_name(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


@dataclass(frozen=True)
class Report:
    """Everything of one run."""

    environment: dict[str, Any]
    limits: Limits
    results: list[Result]

    def write(self, path: Path) -> None:
        """Write `path`.json, and `path`.png when matplotlib is installed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        measured = {name: value for name, value in vars(self.limits).items() if value}
        body = {**self.environment, "limits_per_s": measured, "cases": [result.as_dict() for result in self.results]}
        path.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is None:
            typer.echo("bench: matplotlib is not installed; no PNG was written", err=True)
            return
        from baige_device.cli.bench_plot import plot

        plot(self.environment, self.results, path.with_suffix(".png"))
