"""HiSparse metrics on a GPU: waits are timed by events, and nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baige_device.optimizations.hisparse.metrics import HiSparseMetrics
from baige_device.optimizations.hisparse.stall import StallTimer
from tests.device.gpu import captured, needs_gpu

pytestmark = needs_gpu


@pytest.fixture
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_a_wait_for_another_stream_is_timed(no_syncs: None) -> None:
    timer, side = StallTimer(torch.device("cuda"), every=1), torch.cuda.Stream()
    assert timer.begin()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        landed = torch.cuda.Event()
        landed.record(side)
    torch.cuda.current_stream().wait_event(landed)
    timer.end()
    assert not timer.begin()  # the device has not come by yet
    torch.cuda.synchronize()
    assert timer.begin()
    timer.end()
    assert timer.count == 1
    assert timer.total_us > 100


def test_nothing_is_timed_inside_a_capture() -> None:
    timer = StallTimer(torch.device("cuda"), every=1)
    x, answers = torch.zeros(4, device="cuda"), []

    def work() -> None:
        answers.append(timer.begin())
        x.add_(1)
        if answers[-1]:
            timer.end()

    captured(work)
    assert answers == [True, False]


def test_totals_arrive_without_a_sync(no_syncs: None) -> None:
    totals = torch.zeros(4, dtype=torch.int64, device="cuda")
    metrics = HiSparseMetrics(lambda: totals, interval_s=0)
    totals += 5
    metrics.observe()
    torch.cuda.synchronize()
    metrics.observe()
    assert metrics._counts == [10, 5, 5, 5]
