"""`sparse_attention` in Triton: MLA and GQA, plain or 656-byte fp8 rows, split over the list when queries are few."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.portable.attention_launch import (
    LOG2_E,
    Pool,
    Tiles,
    distance,
    merge_splits,
    offset_type,
    partial_buffers,
)
from baige_device.backends.portable.runtime import (
    INTERPRET,
    best_splits,
    dot_dtype,
    head_blocks,
    launching_on,
    power_of_2,
    processors,
)
from baige_device.backends.portable.sparse_fp8 import attend_fp8_rows
from baige_device.backends.portable.sparse_kernels import sparse_kernel
from baige_device.errors import ContractError

__all__ = ["sparse_attention"]


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
    """See `baige_device/ops/sparse_attention/contract.py`. Launches one kernel, or two when it splits the lists.

    `reserved_sms` has no meaning: its blocks are many and short.
    """
    tokens, heads, _ = q.shape
    width = v_dim if v_rows is None else v_rows.shape[-1]
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if lse is None else lse
    if tokens == 0 or heads == 0:
        return out, lse
    if extra_k is None or extra_indices is None:
        extra_k, extra_v, extra_indices = k_rows, v_rows, indices[:, :, :0]
    if extra_k.dtype != k_rows.dtype:
        raise ContractError("sparse_attention", "extra_k.dtype", str(k_rows.dtype), str(extra_k.dtype))
    extra_indices = extra_indices.to(indices.dtype)
    q = q if q.stride(2) == 1 else q.contiguous()
    with launching_on(q):
        if kv_format == "fp8_ds_mla":
            attend_fp8_rows(q, k_rows, indices, extra_k, extra_indices, scale, out, lse)
        else:
            _plain(q, k_rows, v_rows, indices, extra_k, extra_v, extra_indices, scale, width, out, lse)
    return out, lse


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    extra_k: Tensor,
    extra_v: Tensor | None,
    extra_indices: Tensor,
    scale: float,
    width: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    tokens, heads, dim = q.shape
    groups = indices.shape[1]
    per_group = heads // groups
    blocks = head_blocks(dim)
    shared = v is None and width <= blocks.first
    width_block = blocks.first if shared else power_of_2(width)
    dot = dot_dtype(q, k)
    tiles = _plain_tiles(per_group, max(blocks.first, width_block), str(dot) == "fp32")
    block_count = -(-per_group // tiles.heads)
    k_pool, xk_pool = Pool.of(k), Pool.of(extra_k)
    v_tensor, xv_tensor = (k if v is None else v), (extra_k if extra_v is None else extra_v)
    v_pool, xv_pool = Pool.of(v_tensor), Pool.of(xv_tensor)
    count, extra_count = indices.shape[2], extra_indices.shape[2]
    programs = tokens * groups * block_count
    total = -(-count // tiles.rows) + -(-extra_count // tiles.rows)
    splits = best_splits(programs, total, processors(q.device) * tiles.resident)
    part_out, part_lse = partial_buffers(splits, out, lse)
    sparse_kernel[(programs, splits)](
        q,
        k,
        v_tensor,
        indices,
        part_out,
        part_lse,
        *q.stride()[:2],
        k_pool.page,
        k_pool.row,
        k_pool.group,
        v_pool.page,
        v_pool.row,
        v_pool.group,
        *indices.stride(),
        count,
        k_pool.page_tokens,
        distance(k, extra_k),
        xk_pool.page,
        xk_pool.row,
        xk_pool.group,
        distance(v_tensor, xv_tensor),
        xv_pool.page,
        xv_pool.row,
        xv_pool.group,
        distance(indices, extra_indices),
        *extra_indices.stride(),
        extra_count,
        xk_pool.page_tokens,
        *part_out.stride()[:3],
        *part_lse.stride(),
        scale * LOG2_E,
        groups,
        block_count,
        -(-total // splits),
        HEADS=per_group,
        D=dim,
        D0=blocks.first,
        D1=blocks.second,
        WIDTH=width,
        WIDTH_BLOCK=width_block,
        BLOCK_H=tiles.heads,
        ROWS=tiles.rows,
        PAGED=any(pool.paged for pool in (k_pool, v_pool, xk_pool, xv_pool)),
        EXTRA=extra_count > 0,
        SHARED=shared,
        APART=tiles.apart,
        OFFSET=offset_type((k, v_tensor), extra_count > 0),
        DOT=dot,
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    merge_splits(part_out, part_lse, out, lse)


def _plain_tiles(heads: int, width: int, single: bool) -> Tiles:
    """Block shapes by query heads of one kv head and columns; the 512-column shapes fill Hopper's shared memory."""
    if INTERPRET:
        return Tiles(16, 16, 4, 1, 1, apart=True)
    if single:
        return Tiles(16, 16, 4, 2, 1)
    if heads > 32:
        return Tiles(64, 64, 8, 2, 1, apart=True) if width > 256 else Tiles(64, 64, 4, 3, 2)
    block = 16 if heads <= 16 else 32
    if width <= 256:
        return Tiles(block, 64, 4, 3, 3)
    return Tiles(16, 32, 4, 3, 2) if heads <= 16 else Tiles(32, 64, 8, 2, 1)
