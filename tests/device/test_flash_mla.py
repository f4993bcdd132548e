"""The tuned sparse attention: the kit, and FlashMLA's own shapes (pages of 64 rows, lists in steps of 64)."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from baige_device.ops.sparse_attention.reference import sparse_attention as reference
from baige_device.testing import BackendConformance
from tests.device.gpu import assert_attention_close, captured, needs_gpu

needs_flash_mla = pytest.mark.skipif(importlib.util.find_spec("flash_mla") is None, reason="flash_mla is not installed")
_SCALE = 576**-0.5


@needs_gpu
@needs_flash_mla
class TestTuned(BackendConformance):
    backend = "cuda"
    tier = "tuned"
    ops = ("sparse_attention",)


def _pool(pages: int) -> Tensor:
    pool = torch.empty(pages, 64, 1, 656, dtype=torch.uint8, device="cuda")
    pool[..., :512] = torch.randn(pages, 64, 1, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    pool[..., 512:528] = (0.1 + torch.rand(pages, 64, 1, 4, device="cuda")).view(torch.uint8)
    pool[..., 528:] = torch.randn(pages, 64, 1, 64, device="cuda").bfloat16().view(torch.uint8)
    return pool


def _lists(tokens: int, rows: int, topk: int) -> Tensor:
    """Distinct ids, a third of them masked; the last query has none at all."""
    ids = torch.stack([torch.randperm(rows, device="cuda")[:topk] for _ in range(tokens)]).int().unsqueeze(1)
    ids[:, :, ::3] = -1
    ids[-1] = -1
    return ids


@needs_gpu
@needs_flash_mla
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("extra", [False, True])
def test_fp8_rows_in_pages_of_64(heads: int, extra: bool) -> None:
    from baige_device.backends.cuda.flash_mla import sparse_attention

    pool, q = _pool(40), torch.randn(5, heads, 576, device="cuda").bfloat16()
    args = {"scale": _SCALE, "v_dim": 512, "kv_format": "fp8_ds_mla"}
    if extra:
        args |= {"extra_k": _pool(8), "extra_indices": _lists(5, 512, 128)}
    lists = _lists(5, 40 * 64, 256)
    out = torch.full((5, heads, 512), math.nan, device="cuda", dtype=torch.bfloat16)
    lse = torch.full((5, heads), math.nan, device="cuda")
    got = sparse_attention(q, pool, None, lists, out=out, lse=lse, **args)
    assert got[0].data_ptr() == out.data_ptr()
    assert_attention_close(got, reference(q, pool, None, lists, **args))


@needs_gpu
@needs_flash_mla
def test_bf16_rows() -> None:
    from baige_device.backends.cuda.flash_mla import sparse_attention

    rows, q = torch.randn(2000, 1, 576, device="cuda").bfloat16(), torch.randn(9, 64, 576, device="cuda").bfloat16()
    lists = _lists(9, 2000, 256)
    assert_attention_close(
        sparse_attention(q, rows, None, lists, scale=_SCALE, v_dim=512),
        reference(q, rows, None, lists, scale=_SCALE, v_dim=512),
    )


@needs_gpu
@needs_flash_mla
def test_replayed_graph_follows_new_lists() -> None:
    from baige_device.backends.cuda.flash_mla import sparse_attention

    pool, q, lists = _pool(40), torch.randn(7, 128, 576, device="cuda").bfloat16(), _lists(7, 2560, 256)
    args = {"scale": _SCALE, "v_dim": 512, "kv_format": "fp8_ds_mla"}
    out = torch.empty(7, 128, 512, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(7, 128, device="cuda")
    graph = captured(lambda: sparse_attention(q, pool, None, lists, out=out, lse=lse, **args))
    for _ in range(3):
        lists.copy_(_lists(7, 2560, 256))
        graph.replay()
        torch.cuda.synchronize()
        assert_attention_close((out, lse), reference(q, pool, None, lists, **args))


@needs_gpu
@needs_flash_mla
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 64, 128])
def test_reserved_multiprocessors_get_no_part(heads: int, tokens: int) -> None:
    """The plan is FlashMLA's own less its last parts, eager and in a graph; results differ by the order of sums."""
    from baige_device.backends.cuda import flash_mla

    pool, q, lists = _pool(40), torch.randn(tokens, heads, 576, device="cuda").bfloat16(), _lists(tokens, 2560, 512)
    args = {"scale": _SCALE, "v_dim": 512, "kv_format": "fp8_ds_mla"}
    want = flash_mla.sparse_attention(q, pool, None, lists, **args)
    assert_attention_close(flash_mla.sparse_attention(q, pool, None, lists, reserved_sms=6, **args), want)
    shape = (tokens, heads, 512, q.device)
    own, roomy = flash_mla._schedules()[shape], flash_mla._reserving()[shape, 6]
    if heads == 128 and tokens >= 64:
        assert roomy is not own, "FlashMLA's plan has another layout"
    if roomy is not own:
        assert bool((roomy.tile_scheduler_metadata[-6:, 0] >= tokens).all())
    out = torch.empty(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(tokens, heads, device="cuda")
    graph = captured(lambda: flash_mla.sparse_attention(q, pool, None, lists, out=out, lse=lse, reserved_sms=6, **args))
    graph.replay()
    torch.cuda.synchronize()
    assert_attention_close((out, lse), want)
