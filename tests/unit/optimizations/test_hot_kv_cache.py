"""`HotKVCache` against a dictionary, for ten thousand random steps, and its life-cycle rules (A20, A21)."""

from __future__ import annotations

import pytest
import torch

import baige_device
from baige_device.errors import BaigeError, SettingsError
from baige_device.optimizations.hisparse import HiSparseConfig, HotKVCache
from baige_device.optimizations.hisparse.attend import attend_hot
from baige_device.settings import Settings
from tests.unit.optimizations.hot_cache_life import Life

CPU = torch.device("cpu")
ROW_BYTES = 24


def make(checks: str = "values", **changes: object) -> HotKVCache:
    sizes = {
        "num_layers": 3,
        "row_bytes": ROW_BYTES,
        "topk": 4,
        "hot_tokens": 8,
        "max_requests": 4,
        "max_context_tokens": 64,
        "host_tokens": 160,
        "page_tokens": 4,
        "layer_groups": (0, 0, 1),
    }
    active = baige_device.activate(Settings(backend="reference", checks=checks))  # type: ignore[arg-type]
    return HotKVCache(HiSparseConfig(**{**sizes, **changes}), active.ops, CPU)  # type: ignore[arg-type]


def test_ten_thousand_random_steps_against_a_dictionary() -> None:
    """Admit, decode, verify, grow, retract, resume, abort; every row right, nothing lost, pools exact at the end."""
    cache = make(checks="shapes")
    life = Life(cache, seed=7)
    for _ in range(10_000):
        life.act()
    life.end()
    stats = cache.stats()
    assert 0 < stats.missed < stats.wanted
    assert stats.missed < stats.swapped_rows < 2 * stats.missed  # two of three layers share one resolution
    assert stats.swapped_bytes == stats.swapped_rows * ROW_BYTES
    assert min(life.counts.values()) > 300
    cache.close()


def test_layers_of_a_group_resolve_once() -> None:
    cache = make()
    cache.admit("a", 20)
    cache.begin_step()
    states, topk = cache.state_rows(["a"]), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    for layer in range(3):
        cache.append(layer, states, torch.tensor([16]), torch.zeros(1, ROW_BYTES, dtype=torch.uint8))
        cache.join(cache.swap_in(layer, states, topk))
    calls = baige_device.current().ops.calls()
    assert calls["hot_cache_resolve"] == 2 * 2  # two groups, one append and one swap each
    assert calls["uva_sparse_gather"] == 3


def test_admission_is_the_minimum_over_host_and_device() -> None:
    host_bound = make(max_requests=100, host_tokens=38 * 4, layer_groups=())
    assert [host_bound.admit(index, 4) for index in range(40)] == [True] * 38 + [False] * 2
    assert host_bound.release(0)
    assert host_bound.admit(39, 4)
    device_bound = make(max_requests=2)
    assert [device_bound.admit(index, 4) for index in range(3)] == [True, True, False]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    cache = make()
    with pytest.raises(BaigeError, match=r"'big' of 65 tokens can never fit: a request may have 64 tokens"):
        cache.admit("big", 65)
    small = make(host_tokens=32)
    with pytest.raises(BaigeError, match="the host pool holds 32"):
        small.admit("big", 33)
    assert (cache.free_requests, small.free_host_pages) == (4, 8)


def test_misuse_is_named_and_changes_nothing() -> None:
    cache = make()
    assert cache.admit("a", 8)
    with pytest.raises(BaigeError, match="'a' is admitted already"):
        cache.admit("a", 8)
    with pytest.raises(BaigeError, match="'b' was not admitted"):
        cache.grow("b", 8)
    cache.retract("a")
    with pytest.raises(BaigeError, match="'a' is retracted; resume it first"):
        cache.state_rows(["a"])
    assert cache.resume("a")
    assert cache.resume("a")
    assert cache.release("a")
    assert not cache.release("a")
    assert cache.free_host_pages == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hot_tokens": 3}, "hot_tokens: expected >= topk = 4, got 3"),
        ({"page_tokens": 0}, "page_tokens: expected >= 1, got 0"),
        ({"host_tokens": 3}, "host_tokens: expected >= 4, got 3"),
        ({"layer_groups": (0,)}, "layer_groups: expected 3 groups"),
    ],
)
def test_sizes_that_cannot_work(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make(**change)


@pytest.mark.parametrize("overlap", [False, True])
def test_attention_over_the_hot_buffer_equals_attention_over_everything(overlap: bool) -> None:
    torch.manual_seed(3)
    width, heads, tokens = 16, 2, 12
    cache = make(num_layers=1, layer_groups=(), row_bytes=4 * width)
    cache.admit("a", tokens + 1)
    rows = torch.randn(tokens, width)
    cache.store(0, cache.state_rows(["a"]).expand(tokens), torch.arange(tokens), rows.view(torch.uint8))
    for step, wanted in enumerate([[0, 5, 11, -1], [5, 11, 2, 3]]):
        cache.begin_step()
        states, topk = cache.state_rows(["a"]), torch.tensor([wanted], dtype=torch.int32)
        swap, q = cache.swap_in(0, states, topk), torch.randn(1, heads, width)
        ops = baige_device.current().ops
        out, lse = attend_hot(cache, ops, 0, q, swap, scale=0.3, v_dim=8, overlap=overlap)
        keys = rows[[position for position in wanted if position >= 0]].double()
        logits = 0.3 * q[0].double() @ keys.T
        torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[0].double(), logits.softmax(-1) @ keys[:, :8], rtol=1e-5, atol=1e-5)
        assert int(swap.plan.miss_counts) == (3 if step == 0 else 2)
