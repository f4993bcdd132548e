"""Times one representative call per op and states it as a share of what this machine was measured to reach.

The limits are measured in the same run: host-to-device copy, device copy, and a matrix product. No test looks at these
numbers; they belong to the report that a vendor publishes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baige_device.ops import contract
from baige_device.testing.cases import Trial, measured_cases
from baige_device.testing.lab import Lab, synchronize
from baige_device.testing.runner import Runner

__all__ = ["Limits", "Measurement", "measure", "measure_limits"]

_REPEATS = 7
_COPY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Measurement:
    """One timed call: median of several, and the share of the binding limit."""

    op: str
    case: str
    us: float
    limit: str
    percent: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Limits:
    """What this machine does best, in bytes or floating-point operations a second."""

    link_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_limits(runner: Runner) -> Limits:
    """Measure the host link, the device's own copy bandwidth (bytes read plus written), and bf16 or fp32 products."""
    device = runner.torch_device
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 1024 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left = torch.ones(size, size, dtype=dtype, device=device)
    link = _seconds(partial(target.copy_, host, non_blocking=True), device)
    copy = _seconds(partial(target.copy_, source), device)
    product = _seconds(partial(torch.matmul, left, left), device)
    return Limits(_COPY_BYTES / link, 2 * _COPY_BYTES / copy, 2 * size**3 / product)


def measure(runner: Runner, ops: Iterable[str] = ()) -> list[Measurement]:
    """Verify and then time one large call of each op that the backend serves; what it refuses or fails is left out."""
    limits = measure_limits(runner)
    found: list[Measurement] = []
    for case in measured_cases(ops):
        assert isinstance(case.run, Trial)
        if runner.run(case).status == "passed":
            runner.run(dataclasses.replace(case, run=partial(_measure_one, case.id, case.run, limits, found)))
    return found


def _measure_one(name: str, trial: Trial, limits: Limits, found: list[Measurement], lab: Lab) -> float:
    args = trial.build(lab)
    seconds = _seconds(lambda: getattr(lab.ops, trial.op)(**args), lab.device)
    least, limit = _least_seconds(trial.op, args, limits)
    found.append(Measurement(trial.op, name, seconds * 1e6, limit, 100 * least / seconds))
    return 0.0


def _least_seconds(op: str, args: dict[str, Any], limits: Limits) -> tuple[float, str]:
    """The time a perfect implementation needs: the contract's cost over the limit that binds."""
    work = contract(op).cost(**args)
    if op in ("uva_sparse_gather", "uva_sparse_scatter"):
        return work.bytes / limits.link_bytes_per_s, f"host link {limits.link_bytes_per_s / 1e9:.1f} GB/s"
    memory, compute = work.bytes / limits.copy_bytes_per_s, work.flops / limits.matmul_flops_per_s
    if memory >= compute:
        return memory, f"copy bandwidth {limits.copy_bytes_per_s / 1e9:.1f} GB/s"
    return compute, f"matrix product {limits.matmul_flops_per_s / 1e12:.2f} TFLOP/s"


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median wall time of a call, from an idle device to an idle device."""
    times = []
    for _ in range(_REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
