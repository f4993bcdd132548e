"""The portable sparse attention in the shapes that only a GPU can run: full tiles, many heads, fp8 rows in hardware."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baige_device.ops.sparse_attention.reference import sparse_attention as reference
from tests.device.gpu import assert_attention_close, captured, needs_gpu

pytest.importorskip("triton", reason="Triton is not installed")

_SCALE = 576**-0.5


def _fp8_pool(pages: int, scales: Tensor) -> Tensor:
    """`[P, 64, 1, 656]` with the given scales `[P, 64, 1, 4]`."""
    pool = torch.empty(pages, 64, 1, 656, dtype=torch.uint8, device="cuda")
    pool[..., :512] = torch.randn(pages, 64, 1, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    pool[..., 512:528] = scales.contiguous().view(torch.uint8)
    pool[..., 528:] = torch.randn(pages, 64, 1, 64, device="cuda").bfloat16().view(torch.uint8)
    return pool


def _lists(tokens: int, rows: int, topk: int) -> Tensor:
    """Distinct ids, a third of them masked; the last query has none at all, the first only some at its end."""
    ids = torch.stack([torch.randperm(rows, device="cuda")[:topk] for _ in range(tokens)]).int().unsqueeze(1)
    ids[:, :, ::3] = -1
    ids[-1] = -1
    ids[0, :, : topk - 3] = -1
    return ids


def _check(q: Tensor, pool: Tensor, lists: Tensor, **options: object) -> None:
    from baige_device.backends.portable.sparse_attention import sparse_attention

    out = torch.full((*q.shape[:2], 512), math.nan, device="cuda", dtype=q.dtype)
    lse = torch.full(q.shape[:2], math.nan, device="cuda")
    sparse_attention(q, pool, None, lists, scale=_SCALE, v_dim=512, out=out, lse=lse, **options)  # type: ignore[arg-type]
    want = reference(q, pool, None, lists, scale=_SCALE, v_dim=512, **options)  # type: ignore[arg-type]
    assert_attention_close((out, lse), want)


@needs_gpu
@pytest.mark.parametrize("heads", [33, 64, 128])
@pytest.mark.parametrize("extra", [False, True])
def test_many_heads_of_bf16_rows(heads: int, extra: bool) -> None:
    torch.manual_seed(heads)
    pool, q = torch.randn(3000, 1, 576, device="cuda").bfloat16(), torch.randn(5, heads, 576, device="cuda").bfloat16()
    options = {"extra_k": pool[:500].clone(), "extra_indices": _lists(5, 500, 70)} if extra else {}
    _check(q, pool, _lists(5, 3000, 515), **options)


@needs_gpu
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 128])
@pytest.mark.parametrize("extra", [False, True])
def test_fp8_rows_by_heads(heads: int, extra: bool) -> None:
    torch.manual_seed(heads)
    pool = _fp8_pool(40, 0.1 + torch.rand(40, 64, 1, 4, device="cuda"))
    q = torch.randn(5, heads, 576, device="cuda").bfloat16()
    options = {"extra_k": pool[:8].clone(), "extra_indices": _lists(5, 512, 70)} if extra else {}
    _check(q, pool, _lists(5, 2560, 515), kv_format="fp8_ds_mla", **options)


@needs_gpu
@pytest.mark.parametrize("heads", [16, 32])
def test_scales_far_apart(heads: int) -> None:
    """Scales from 1e-7 to 1 in one row and between rows, rows of zeros, and queries of very different size."""
    torch.manual_seed(heads)
    scales = 10.0 ** (-7 + 7 * torch.rand(40, 64, 1, 4, device="cuda"))
    scales[:, ::7] = 0.0
    q = torch.randn(6, heads, 576, device="cuda") * 10.0 ** torch.linspace(-6, -1, 6, device="cuda")[:, None, None]
    _check(q.bfloat16(), _fp8_pool(40, scales), _lists(6, 2560, 515), kv_format="fp8_ds_mla")


@needs_gpu
def test_every_code_of_e4m3() -> None:
    """All finite codes, attended one row at a time, come back as the values that they stand for."""
    from baige_device.backends.portable.sparse_attention import sparse_attention

    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    pool = _fp8_pool(4, torch.ones(4, 64, 1, 4, device="cuda")).view(-1, 1, 656)
    pool[: codes.numel(), 0, :512] = codes[:, None]
    lists = torch.arange(codes.numel(), device="cuda", dtype=torch.int32)[:, None, None]
    q = torch.zeros(codes.numel(), 16, 576, device="cuda", dtype=torch.bfloat16)
    out, _ = sparse_attention(q, pool, None, lists, scale=_SCALE, v_dim=512, kv_format="fp8_ds_mla")
    want = codes.view(torch.float8_e4m3fn).float()[:, None, None].expand(-1, 16, 512)
    assert torch.equal(out.float(), want)


@needs_gpu
def test_replayed_graph_of_few_heads_follows_new_lists() -> None:
    from baige_device.backends.portable.sparse_attention import sparse_attention

    torch.manual_seed(0)
    pool = _fp8_pool(40, 0.1 + torch.rand(40, 64, 1, 4, device="cuda"))
    q, lists = torch.randn(7, 16, 576, device="cuda").bfloat16(), _lists(7, 2560, 256)
    args = {"scale": _SCALE, "v_dim": 512, "kv_format": "fp8_ds_mla"}
    out, lse = torch.empty(7, 16, 512, device="cuda", dtype=torch.bfloat16), torch.empty(7, 16, device="cuda")
    graph = captured(lambda: sparse_attention(q, pool, None, lists, out=out, lse=lse, **args))  # type: ignore[arg-type]
    for _ in range(3):
        lists.copy_(_lists(7, 2560, 256))
        graph.replay()
        torch.cuda.synchronize()
        want = reference(q, pool, None, lists, **args)  # type: ignore[arg-type]
        torch.testing.assert_close(out.float(), want[0].float(), atol=1.6e-2, rtol=1.6e-2)
