"""`sparse_attention` for MLA: the vendor's sparse decode and prefill kernels (one kv head, 576 columns, value 512)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from baige_device.backends.kunlun import normalise, partial, rows, vendor
from baige_device.backends.kunlun.limits import (
    MLA_HEAD_SIZE,
    MLA_VALUE_SIZE,
    SPARSE_DECODE_ROWS,
    SPARSE_TOPK,
    SPARSE_TOPK_ALIGN,
)
from baige_device.errors import ContractError

__all__ = ["as_requests", "attend_lists", "decode", "latent_rows", "prefill", "sparse_attention"]

_OP = "sparse_attention"


def sparse_attention(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor | None,
    indices: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    kv_format: str = "plain",
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_indices: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    reserved_sms: int = 0,
) -> tuple[Tensor, Tensor]:
    """See the contract; MLA rows of 576 bf16 or fp16 only. No sync.

    Lists are cut at 2048 entries and the parts merged by LSE; a second set is one more part.
    """
    _refuse_others(q, k_rows, v_rows, v_dim, kv_format)
    result, total = attend_lists(q, *latent_rows(k_rows, indices.squeeze(1)), scale)
    if extra_k is not None and extra_indices is not None:
        more = attend_lists(q, *latent_rows(extra_k, extra_indices.squeeze(1)), scale)
        result, total = partial.merge(result, total, *more)
    return partial.deliver(result, total, None, out, lse)


def latent_rows(pool: Tensor, lists: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous rows `[S, 576]` of a `[S, 1, 576]` or `[P, N, 1, 576]` pool, and the lists `[T, K]` into them.

    A contiguous pool is a view. Of a strided pool the smaller is copied: the whole pool, or the listed rows.
    """
    if pool.is_contiguous():
        return pool.view(-1, pool.shape[-1]), lists
    if pool.numel() <= lists.numel() * pool.shape[-1]:
        return pool.reshape(-1, pool.shape[-1]), lists
    listed = rows.take_rows(rows.paged(pool, 2), lists.clamp(min=0)).view(-1, pool.shape[-1])
    own = torch.arange(lists.numel(), device=lists.device).view_as(lists)
    return listed, torch.where(lists >= 0, own, -1)


def attend_lists(q: Tensor, pool: Tensor, lists: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend each query `[T, H, 576]` over its list `[T, K]` of rows of `[S, 576]`; -1 is masked."""
    result = normalise.zeros((*q.shape[:2], MLA_VALUE_SIZE.value), q.dtype, q.device)
    total = normalise.filled_lse(q.shape[0], q.shape[1], q.device)
    if result.numel() == 0 or lists.shape[1] == 0 or pool.shape[0] == 0:
        return result, total
    attend = decode if q.shape[0] <= SPARSE_DECODE_ROWS.value else prefill
    query = normalise.dense(q)
    parts = [attend(query, pool, part, scale) for part in _cut(lists)]
    result, total = parts[0]
    for part in parts[1:]:
        result, total = partial.merge(result, total, *part)
    return result, total


def _cut(lists: Tensor) -> Iterator[Tensor]:
    """Lists in pieces that the kernels take, the width filled up with -1."""
    for piece in lists.split(SPARSE_TOPK.value, 1):
        missing = -piece.shape[1] % SPARSE_TOPK_ALIGN.value
        yield normalise.int32(functional.pad(piece, (0, missing), value=-1))


def decode(q: Tensor, pool: Tensor, lists: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query is a request of one token. The stated length admits every row and every entry.

    Whether the kernel bounds row ids or list positions by `kv_lod` is open; the larger bound suits each reading.
    """
    tokens, heads, _ = q.shape
    result = normalise.zeros((tokens, 1, heads, MLA_VALUE_SIZE.value), q.dtype, q.device)
    peaks = normalise.zeros((tokens, 1, heads), torch.float32, q.device)
    sums = normalise.zeros((tokens, 1, heads), torch.float32, q.device)
    visible = max(pool.shape[0], lists.shape[1])
    host, device = normalise.constant_pair(tokens, visible, q.device)
    vendor.kernel_module().fwd_kvcache_mla(
        as_requests(q), pool, lists.unsqueeze(1), host, result, peaks, sums, scale, visible, kv_lod_xpu=device
    )
    seen = (lists >= 0).any(1)
    total = partial.lse_of_sums(peaks.squeeze(1), sums.squeeze(1))
    return partial.deliver(result.squeeze(1), total, seen, None, None)


def as_requests(q: Tensor) -> Tensor:
    """`[T, H, 576]` as T requests of one query, far from the kernel's bound of two."""
    return q.unsqueeze(1)


def prefill(q: Tensor, pool: Tensor, lists: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All queries as one request that sees every row; the list alone decides, so causality is off."""
    tokens, heads, _ = q.shape
    result = normalise.zeros((tokens, heads, MLA_VALUE_SIZE.value), q.dtype, q.device)
    peaks = normalise.zeros((tokens, heads), torch.float32, q.device)
    total = normalise.filled_lse(tokens, heads, q.device)
    q_lod = normalise.length_pair([0, tokens], q.device)
    kv_lod = normalise.length_pair([0, max(pool.shape[0], lists.shape[1])], q.device)
    vendor.kernel_module().sparse_prefill_fwd_opt(
        q, pool, lists.unsqueeze(1), result, peaks, total, scale, *q_lod, *kv_lod, MLA_VALUE_SIZE.value, False
    )
    return partial.deliver(result, total, (lists >= 0).any(1), None, None)


def _refuse_others(q: Tensor, k_rows: Tensor, v_rows: Tensor | None, v_dim: int, kv_format: str) -> None:
    if kv_format != "plain":
        raise ContractError(_OP, "kv_format", "plain (Kunlun has no float8)", repr(kv_format))
    if v_rows is not None or q.shape[2] != MLA_HEAD_SIZE.value or v_dim != MLA_VALUE_SIZE.value:
        raise ContractError(
            _OP, "v_dim", "MLA rows of 576 columns with v_dim=512", f"{q.shape[2]} columns with v_dim={v_dim}"
        )
    if k_rows.shape[-2] != 1 or q.dtype not in (torch.bfloat16, torch.float16):
        raise ContractError(_OP, "k_rows", "one kv head of bf16 or fp16", f"{k_rows.shape[-2]} heads of {k_rows.dtype}")
