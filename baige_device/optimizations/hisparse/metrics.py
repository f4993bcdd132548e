"""Prometheus metrics of HiSparse, fed once a step without ever waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baige_device.optimizations.hisparse.stall import StallTimer

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["HiSparseMetrics"]

_COUNTERS = (
    ("wanted", "Top-k entries that attention asked for"),
    ("missed", "Tokens of those that were not in the hot buffer"),
    ("swapped_rows", "Rows copied from host to device, over all layers"),
    ("swapped_bytes", "Bytes copied from host to device, over all layers"),
)


class HiSparseMetrics:
    """Counts of one rank. `observe` belongs to the engine's thread, `collect` to any: it reads plain numbers.

    The totals are copied to the host behind the step, and published by a later `observe` that finds the copy done; they
    are therefore late by `interval_s` and about a step.
    """

    def __init__(
        self, totals: Callable[[], Tensor | None], stall: StallTimer | None = None, *, interval_s: float = 1.0
    ) -> None:
        """
        Args:
            totals: the running totals on the device, int64 `[4]`: hits, misses, swapped rows, swapped bytes; None
                before the first. Called at most once in `interval_s`.
            stall: the timer around the waits, when there is one.
        """
        self._totals = totals
        self._stall = stall
        self._interval_s = interval_s
        self._next_s = 0.0
        self._copy: Tensor | None = None
        self._copied: Any = None
        self._counts = [0, 0, 0, 0]
        self._free: dict[str, int] = {}
        self._stalls = (0, 0.0)

    def observe(self, *, host_pages_free: int | None = None, hot_rows_free: int | None = None) -> None:
        """Take a step's state; call it between steps, outside graph captures.

        `None` leaves a gauge out: the engine's block manager owns the pages.
        """
        if host_pages_free is not None:
            self._free["host_pages_free"] = host_pages_free
        if hot_rows_free is not None:
            self._free["hot_rows_free"] = hot_rows_free
        if self._copied is not None:
            if not self._copied.query():
                return
            assert self._copy is not None
            self._publish(self._copy)
            self._copied = None
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self._read()

    def collect(self) -> Iterable[Metric]:
        """Yield `baige_hisparse_{wanted,missed,swapped_rows,swapped_bytes}_total`, `baige_hisparse_stall_us`, and the
        gauges `baige_hisparse_host_pages_free` and `baige_hisparse_hot_rows_free`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        for (name, text), value in zip(_COUNTERS, self._counts, strict=True):
            yield CounterMetricFamily(f"baige_hisparse_{name}", text, value=value)
        count, total_us = self._stalls
        yield SummaryMetricFamily(
            "baige_hisparse_stall_us",
            "Microseconds that compute waited for a layer's rows, of the waits that were sampled",
            count_value=count,
            sum_value=total_us,
        )
        for name, free in list(self._free.items()):
            yield GaugeMetricFamily(f"baige_hisparse_{name}", name.replace("_", " ").capitalize(), value=free)

    def _read(self) -> None:
        totals = self._totals()
        if totals is None:
            return
        if totals.device.type != "cuda":
            self._publish(totals)
            return
        if self._copy is None:
            self._copy = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
        self._copy.copy_(totals, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(totals.device))

    def _publish(self, totals: Tensor) -> None:
        hits, misses, rows, num_bytes = totals.tolist()
        self._counts = [hits + misses, misses, rows, num_bytes]
        if self._stall is not None:
            self._stalls = (self._stall.count, self._stall.total_us)
