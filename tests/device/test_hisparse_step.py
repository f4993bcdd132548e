"""The hot cache's step on a GPU as a captured graph, with overlap, waves and parts, against all KV there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baige_device.optimizations.hisparse import HiSparseConfig, HotKVCache
from baige_device.optimizations.hisparse.attend import attend_hot
from tests.device.gpu import needs_gpu

pytestmark = needs_gpu
BATCH, HEADS, TOPK, HOT, TOKENS, WIDTH = 6, 16, 128, 256, 1024, 64


def ops() -> Any:
    from baige_device.backends.cuda.gather import uva_sparse_gather, uva_sparse_scatter
    from baige_device.backends.cuda.host_memory import host_alloc
    from baige_device.backends.cuda.resolve import hot_cache_resolve
    from baige_device.backends.portable.kv_write import kv_write
    from baige_device.backends.portable.merge_attention import merge_attention
    from baige_device.backends.portable.sparse_attention import sparse_attention

    return SimpleNamespace(
        host_alloc=host_alloc, hot_cache_resolve=hot_cache_resolve, kv_write=kv_write, merge_attention=merge_attention,
        sparse_attention=sparse_attention, uva_sparse_gather=uva_sparse_gather, uva_sparse_scatter=uva_sparse_scatter,
    )  # fmt: skip


def window(step: int) -> Tensor:
    """Positions `[B, TOPK]` of which 16 are new in every step; the LRU has dropped one before it comes back."""
    ring = torch.stack([torch.randperm(TOKENS - 1, generator=torch.Generator().manual_seed(r)) for r in range(BATCH)])
    return ring[:, (16 * step + torch.arange(TOPK)) % 512].int().cuda()


@pytest.mark.parametrize("way", ["serial", "overlap", "compact", "waves", "parts", "few SMs"])
def test_captured_steps_equal_attention_over_everything(way: str) -> None:
    torch.manual_seed(8)
    table, scale = ops(), WIDTH**-0.5
    config = HiSparseConfig(
        num_layers=1, row_bytes=2 * WIDTH, topk=TOPK, hot_tokens=HOT, max_requests=BATCH, max_context_tokens=TOKENS,
        host_tokens=BATCH * TOKENS,
    )  # fmt: skip
    cache = HotKVCache(config, table, torch.device("cuda", 0))
    rows = torch.randn(BATCH, TOKENS, WIDTH, device="cuda").bfloat16()
    for request in range(BATCH):
        assert cache.admit(request, TOKENS)
        positions = torch.arange(TOKENS, device="cuda")
        cache.store(0, cache.state_rows([request]).expand(TOKENS), positions, rows[request].view(torch.uint8))
    cache.begin_step()
    states = cache.state_rows(list(range(BATCH)))
    halves = [states[:2].clone(), states[2:].clone()]
    topk, q = window(0), torch.randn(BATCH, HEADS, WIDTH, device="cuda").bfloat16()
    new = torch.randn(BATCH, WIDTH, device="cuda").bfloat16().view(torch.uint8)
    last = torch.full((BATCH,), TOKENS - 1, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        cache.begin_step()
        cache.append(0, states, last, new)
        if way == "parts":
            swap: Any = [cache.swap_in(0, halves[0], topk[:2]), cache.swap_in(0, halves[1], topk[2:], part=1)]
        else:
            waves, max_sms = (4, 2) if way == "waves" else (), 2 if way == "few SMs" else 0
            swap = cache.swap_in(0, states, topk, waves=waves, max_sms=max_sms)
        width = {"compact": TOPK, "waves": TOPK}.get(way, 0)
        result = attend_hot(
            cache, table, 0, q, swap, scale=scale, v_dim=32, overlap=way != "serial", miss_width=width
        )  # fmt: skip
        cache.end_step()
        return result

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for index in range(40):
        topk.copy_(window(index))
        q.normal_()
        graph.replay()
        keys = rows.gather(1, topk.long()[..., None].expand(-1, -1, WIDTH)).float()
        logits = scale * torch.einsum("bhd,bkd->bhk", q.float(), keys)
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-2, atol=1e-2)
        right = torch.einsum("bhk,bkd->bhd", logits.softmax(-1), keys[..., :32])
        torch.testing.assert_close(out.float(), right, rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    assert torch.equal(cache.host[0].view(BATCH, TOKENS, -1)[:, -1].cuda(), new)
    stats = cache.stats()
    assert 0 < stats.missed < stats.wanted
    cache.close()
