"""Timing on the device: medians of graph replays, and the limits of this machine measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

__all__ = ["Limits", "measure_limits", "time_us"]

_REPLAYS = 9
_WARM_UP = 2


@dataclass(frozen=True)
class Limits:
    """What this machine does best, in bytes or floating-point operations a second."""

    link: float
    copy: float
    matmul: float
    peer_link: float = 0.0

    def share(self, limit: str, work: int, us: float) -> float:
        """Percent of the limit that `work` in `us` microseconds is; 0 for a limit that was not measured."""
        best: float = getattr(self, limit)
        return 100.0 * work / (us * 1e-6) / best if best else 0.0


def time_us(run: Callable[[int], object], sets: int = 1, *, capturable: bool = True) -> float:
    """Median time of one call in microseconds: a replayed graph of all input sets, or eager calls where that fails."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.synchronize()
    if not capturable:
        calls = [partial(run, index % sets) for index in range(_REPLAYS + _WARM_UP)]
        return statistics.median(_between_events(call) for call in calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            run(index)
    for _ in range(_WARM_UP):
        graph.replay()
    return statistics.median(_between_events(graph.replay) for _ in range(_REPLAYS)) / sets


def _between_events(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def measure_limits() -> Limits:
    """Pinned host-to-device copy of 256 MiB, device copy of 1 GiB, and an 8192-cubed bf16 product on random data."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    link = time_us(lambda _: target[: host.numel()].copy_(host, non_blocking=True))
    # Captured copies may go to a copy engine, which is slower than the copy kernel.
    copy = min(time_us(lambda _: target.copy_(source), capturable=capturable) for capturable in (True, False))
    matmul = time_us(lambda _: torch.matmul(left, right, out=product), 4)
    return Limits(1e6 * host.numel() / link, 2e6 * source.numel() / copy, 2e6 * 8192**3 / matmul)
