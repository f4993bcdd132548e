"""The tuned dense attention: the kit, and FlashAttention's own paths (splits, long tables, pages of its block size)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baige_device.backends.cuda.flash_attention_library import find_flash_attention
from baige_device.ops.attend_paged.reference import attend_paged as reference
from baige_device.testing import BackendConformance
from tests.device.gpu import assert_attention_close, captured, needs_gpu

needs_flash_attention = pytest.mark.skipif(find_flash_attention()[0] is None, reason=find_flash_attention()[1])


@needs_gpu
@needs_flash_attention
class TestTuned(BackendConformance):
    backend = "cuda"
    tier = "tuned"
    ops = ("attend_paged",)


def _batch(
    lens: list[tuple[int, int]], heads: int, groups: int, size: int, page: int, mla: bool = False, padding: int = 0
) -> dict[str, Any]:
    """(queries, tokens) of each request over shuffled pages whose rest is NaN, and `padding` rows behind."""
    columns = max(-(-length // page) for _, length in lens) + 1
    pages = len(lens) * columns
    table = torch.randperm(pages, device="cuda").int().view(len(lens), columns)
    k_cache = torch.randn(pages, page, groups, size, device="cuda").bfloat16()
    v_cache = None if mla else torch.randn(pages, page, groups, size, device="cuda").bfloat16()
    for row, (_, length) in enumerate(lens):
        for column in range(length // page, columns):
            dead = max(0, length - column * page)
            for cache in (k_cache, *([] if v_cache is None else [v_cache])):
                cache[table[row, column], dead:] = math.nan
    starts = torch.tensor([0] + [queries for queries, _ in lens], device="cuda").cumsum(0).int()
    return {
        "q": torch.randn(int(starts[-1]) + padding, heads, size, device="cuda").bfloat16(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "q_starts": starts,
        "seq_lens": torch.tensor([length for _, length in lens], device="cuda").int(),
        "scale": size**-0.5,
        "v_dim": 512 if mla else 0,
        "max_query_tokens": max(queries for queries, _ in lens),
    }


@needs_gpu
@needs_flash_attention
@pytest.mark.parametrize("page", [16, 128, 256])
@pytest.mark.parametrize(
    "lens",
    [[(1, 9000)], [(1, 700), (1, 5), (1, 0), (1, 3000)], [(300, 300), (1, 2000), (70, 501)]],
    ids=["one-long", "ragged-decode", "mixed"],
)
def test_long_batches(lens: list[tuple[int, int]], page: int) -> None:
    """Several parts a request, and pages that its block of keys divides, NaN past the lengths."""
    from baige_device.backends.cuda.flash_attention import attend_paged

    args = _batch(lens, 32, 8, 128, page, padding=2)
    assert_attention_close(attend_paged(**args), reference(**args))


@needs_gpu
@needs_flash_attention
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("lens", [[(1, 4000), (1, 130)], [(200, 333)]], ids=["decode", "prefill"])
def test_latent_of_mla(lens: list[tuple[int, int]], page: int, heads: int) -> None:
    from baige_device.backends.cuda.flash_attention import attend_paged

    args = _batch(lens, heads, 1, 576, page, mla=True)
    assert_attention_close(attend_paged(**args), reference(**args))


@needs_gpu
@needs_flash_attention
@pytest.mark.parametrize("changes", [{"window": 100}, {"causal": False, "window": 100}, {"logits_soft_cap": 2.0}])
def test_masks_and_soft_cap(changes: dict[str, Any]) -> None:
    from baige_device.backends.cuda.flash_attention import attend_paged

    args = _batch([(1, 2000), (90, 400)], 16, 2, 128, 64) | changes
    assert_attention_close(attend_paged(**args), reference(**args))


@needs_gpu
@needs_flash_attention
@pytest.mark.parametrize("mla", [False, True])
def test_replayed_graph_follows_new_lengths(mla: bool) -> None:
    """Captured with one set of lengths, replayed with others, the number of requests with tokens among them."""
    from baige_device.backends.cuda.flash_attention import attend_paged

    size, heads, groups = (576, 16, 1) if mla else (128, 32, 8)
    args = _batch([(1, 4000)] * 6, heads, groups, size, 16, mla)
    out = torch.empty(6, heads, 512 if mla else 128, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(6, heads, device="cuda")
    graph = captured(lambda: attend_paged(**args, out=out, lse=lse))
    for lens in ([4000, 1, 0, 0, 0, 0], [17, 300, 4000, 2, 1999, 64], [0] * 6):
        args["seq_lens"].copy_(torch.tensor(lens))
        graph.replay()
        torch.cuda.synchronize()
        assert_attention_close((out, lse), reference(**args))
