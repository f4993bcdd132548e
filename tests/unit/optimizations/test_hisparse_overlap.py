"""Overlap: waves, parts of a batch, and compact lists of misses give the attention that one swap-in gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import baige_device
from baige_device.optimizations.hisparse import HiSparseConfig, HotKVCache, SwapIn
from baige_device.optimizations.hisparse.attend import attend_hot
from baige_device.settings import Settings

WIDTH, HEADS, TOKENS, TOPK, BATCH = 16, 2, 40, 6, 5


def make(hot_tokens: int) -> tuple[HotKVCache, Tensor]:
    """A cache with `BATCH` requests of `TOKENS` tokens, and their rows fp32 `[B, tokens, width]`."""
    config = HiSparseConfig(
        num_layers=1, row_bytes=4 * WIDTH, topk=TOPK, hot_tokens=hot_tokens, max_requests=BATCH,
        max_context_tokens=TOKENS, host_tokens=BATCH * TOKENS, page_tokens=4,
    )  # fmt: skip
    active = baige_device.activate(Settings(backend="reference", checks="values"))
    cache = HotKVCache(config, active.ops, torch.device("cpu"))
    rows = torch.randn(BATCH, TOKENS, WIDTH)
    for request in range(BATCH):
        assert cache.admit(request, TOKENS)
        states = cache.state_rows([request]).expand(TOKENS)
        cache.store(0, states, torch.arange(TOKENS), rows[request].view(torch.uint8))
    return cache, rows


def draw_topk(step: int) -> Tensor:
    """Lists of distinct positions; from step to step all but one stay, and one list is not full."""
    order = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(r)) for r in range(BATCH)])
    topk = order[:, step : step + TOPK].int()
    topk[2, -1] = -1
    return topk


def attend(cache: HotKVCache, q: Tensor, swap: SwapIn | list[SwapIn], **options: int | bool) -> tuple[Tensor, Tensor]:
    ops = baige_device.current().ops
    return attend_hot(cache, ops, 0, q, swap, scale=0.3, v_dim=8, **options)  # type: ignore[arg-type]


def check(rows: Tensor, topk: Tensor, q: Tensor, got: tuple[Tensor, Tensor]) -> None:
    for request in range(BATCH):
        keys = rows[request, topk[request][topk[request] >= 0].long()].double()
        logits = 0.3 * q[request].double() @ keys.T
        torch.testing.assert_close(got[1][request].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[0][request].double(), logits.softmax(-1) @ keys[:, :8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hot_tokens", [8, 11])  # a row is found by bits, or by a sum
@pytest.mark.parametrize("waves", [(), (BATCH,), (3, 2), (1, 1, 3)])
@pytest.mark.parametrize("compact", [False, True])
def test_waves(hot_tokens: int, waves: tuple[int, ...], compact: bool) -> None:
    torch.manual_seed(5)
    cache, rows = make(hot_tokens)
    states = cache.state_rows(list(range(BATCH)))
    for step in range(4):
        cache.begin_step()
        topk, q = draw_topk(step), torch.randn(BATCH, HEADS, WIDTH)
        swap = cache.swap_in(0, states, topk, waves=waves)
        assert swap.missed().sum(1).tolist() == swap.plan.miss_counts.tolist()
        width = int(swap.plan.miss_counts.max()) if compact else 0
        check(rows, topk, q, attend(cache, q, swap, overlap=True, miss_width=width))
    assert cache.stats().missed == BATCH * TOPK - 1 + 3 * BATCH  # all at first (one list is short), then one a step


def test_attention_is_told_what_the_transfer_holds() -> None:
    torch.manual_seed(9)
    cache, rows = make(8)
    cache.begin_step()
    topk, q = draw_topk(0), torch.randn(BATCH, HEADS, WIDTH)
    swap = cache.swap_in(0, cache.state_rows(list(range(BATCH))), topk, waves=(1, 1, 3), max_sms=3)
    assert [swap.copying_sms(wave) for wave in range(4)] == [6, 6, 3, 0]
    check(rows, topk, q, attend(cache, q, swap, overlap=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_parts_of_a_batch(overlap: bool) -> None:
    torch.manual_seed(6)
    cache, rows = make(8)
    parts = [slice(0, 2), slice(2, BATCH)]
    states = [cache.state_rows(list(range(BATCH))[part]) for part in parts]
    for step in range(3):
        cache.begin_step()
        topk, q = draw_topk(step), torch.randn(BATCH, HEADS, WIDTH)
        swaps = [cache.swap_in(0, states[n], topk[part], part=n) for n, part in enumerate(parts)]
        check(rows, topk, q, attend(cache, q, swaps, overlap=overlap))
    assert baige_device.current().ops.calls()["hot_cache_resolve"] == 6


def test_queries_of_one_request_share_their_misses() -> None:
    """Two queries want the same missing token: it is loaded once and both attend it."""
    torch.manual_seed(7)
    cache, rows = make(8)
    states, topk = cache.state_rows([0, 0]), torch.tensor([[1, 2, 3, -1, -1, -1], [2, 3, 9, -1, -1, -1]]).int()
    cache.begin_step()
    swap, q = cache.swap_in(0, states, topk), torch.randn(2, HEADS, WIDTH)
    out, lse = attend(cache, q, swap, overlap=True)
    for query in range(2):
        keys = rows[0, topk[query, :3].long()].double()
        logits = 0.3 * q[query].double() @ keys.T
        torch.testing.assert_close(lse[query].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[query].double(), logits.softmax(-1) @ keys[:, :8], rtol=1e-5, atol=1e-5)
    assert int(swap.plan.miss_counts.sum()) == 4


@pytest.mark.parametrize(("requests", "width"), [([0, 1], 2), ([0, 0], 6)])
def test_lists_of_misses_that_cannot_hold_them_stop_the_step(requests: list[int], width: int) -> None:
    cache, _ = make(8)
    topk = torch.tensor([[1, 2, 3, -1, -1, -1], [2, 3, 9, -1, -1, -1]]).int()
    cache.begin_step()
    swap, q = cache.swap_in(0, cache.state_rows(requests), topk), torch.randn(2, HEADS, WIDTH)
    with pytest.raises(
        RuntimeError, match=f"expected at most {width} misses a query, and no two queries of one request"
    ):
        attend(cache, q, swap, overlap=True, miss_width=width)
