"""HiSparse metrics as Prometheus reads them, fed by a real cache."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry

import baige_device
from baige_device.metrics import add_source, remove_source, serve
from baige_device.optimizations.hisparse import HiSparseConfig, HotKVCache
from baige_device.optimizations.hisparse.metrics import HiSparseMetrics
from baige_device.optimizations.hisparse.stall import StallTimer
from baige_device.settings import Settings


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cache(port: int) -> Iterator[HotKVCache]:
    """Three layers in two groups; a prompt of 16 tokens is stored."""
    active = baige_device.activate(Settings(backend="reference", metrics_port=port))
    config = HiSparseConfig(
        num_layers=3, row_bytes=24, topk=4, hot_tokens=8, max_requests=2, max_context_tokens=32, host_tokens=64,
        page_tokens=4, layer_groups=(0, 0, 1),
    )  # fmt: skip
    made = HotKVCache(config, active.ops, torch.device("cpu"))
    assert made.admit("a", 16)
    states = made.state_rows(["a"]).expand(16)
    for layer in range(3):
        made.store(layer, states, torch.arange(16), torch.zeros(16, 24, dtype=torch.uint8))
    yield made
    made.close()


def swap(cache: HotKVCache, wanted: list[int]) -> None:
    cache.begin_step()
    states, topk = cache.state_rows(["a"]), torch.tensor([wanted], dtype=torch.int32)
    for layer in range(3):
        cache.join(cache.swap_in(layer, states, topk))


def values(metrics: HiSparseMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return {sample.name: sample.value for family in registry.collect() for sample in family.samples}


def test_counters_and_gauges_of_a_cache(cache: HotKVCache) -> None:
    metrics = HiSparseMetrics(cache.totals, cache.stall, interval_s=0)
    swap(cache, [1, 2, 3, -1])
    swap(cache, [2, 3, 4, 5])
    metrics.observe(host_pages_free=cache.free_host_pages, hot_rows_free=cache.free_requests)
    assert values(metrics) == {
        "baige_hisparse_wanted_total": 2 * (3 + 4),
        "baige_hisparse_missed_total": 2 * (3 + 2),
        "baige_hisparse_swapped_rows_total": 3 * (3 + 2),
        "baige_hisparse_swapped_bytes_total": 3 * (3 + 2) * 24,
        "baige_hisparse_stall_us_count": 0,
        "baige_hisparse_stall_us_sum": 0,
        "baige_hisparse_host_pages_free": 12,
        "baige_hisparse_hot_rows_free": 1,
    }
    stats = cache.stats()
    assert (stats.wanted, stats.missed, stats.swapped_rows, stats.swapped_bytes) == (14, 10, 15, 360)
    assert stats.hit_rate == pytest.approx(1 - 10 / 14)


def test_the_totals_are_read_once_an_interval() -> None:
    reads = []

    def totals() -> torch.Tensor:
        reads.append(1)
        return torch.tensor([1, 2, 3, 4])

    metrics = HiSparseMetrics(totals, interval_s=3600)
    for _ in range(5):
        metrics.observe()
    assert len(reads) == 1
    assert values(metrics)["baige_hisparse_wanted_total"] == 3
    assert "baige_hisparse_host_pages_free" not in values(metrics)


def test_nothing_counted_yet() -> None:
    metrics = HiSparseMetrics(lambda: None, interval_s=0)
    metrics.observe(hot_rows_free=0)
    assert values(metrics)["baige_hisparse_missed_total"] == 0
    assert values(metrics)["baige_hisparse_hot_rows_free"] == 0


def test_sources_come_and_go_while_they_are_served(cache: HotKVCache, port: int) -> None:
    def scrape() -> str:
        return str(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())

    serve(baige_device.current())
    assert "baige_hisparse" not in scrape()
    metrics = HiSparseMetrics(cache.totals, interval_s=0)
    add_source(metrics)
    swap(cache, [1, 2, 3, 4])
    metrics.observe()
    assert "baige_hisparse_missed_total 8.0" in scrape()
    remove_source(metrics)
    remove_source(metrics)
    assert "baige_hisparse" not in scrape()


def test_no_stall_is_measured_without_device_events() -> None:
    timer = StallTimer(torch.device("cpu"), every=1)
    with timer.timed():
        assert not any(timer.begin() for _ in range(5))
    assert (timer.count, timer.total_us) == (0, 0.0)
