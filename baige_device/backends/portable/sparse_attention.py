"""`sparse_attention` in Triton: MLA and GQA, plain or 656-byte fp8 rows, split over the list when queries are few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from baige_device.backends.portable.runtime import (
    INTERPRET,
    best_splits,
    dot_dtype,
    head_blocks,
    launching_on,
    power_of_2,
    processors,
)
from baige_device.backends.portable.softmax_kernels import merge_splits_kernel
from baige_device.backends.portable.sparse_fp8_kernels import sparse_fp8_kernel
from baige_device.backends.portable.sparse_kernels import sparse_kernel
from baige_device.errors import ContractError

__all__ = ["LOG2_E", "Pool", "Tiles", "merge_splits", "partial_buffers", "sparse_attention"]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiles:
    """Block shapes and launch options of one attention kernel. `resident` programs fit on a multiprocessor at once."""

    heads: int
    rows: int
    warps: int
    stages: int
    resident: int


@dataclass(frozen=True)
class Pool:
    """Element strides of a `[S, G, D]` or `[P, N, G, D]` pool. A paged pool without gaps is read as a flat one."""

    page_tokens: int
    page: int
    row: int
    group: int
    paged: bool

    @classmethod
    def of(cls, pool: Tensor) -> Pool:
        if pool.dim() == 3:
            return cls(1, 0, pool.stride(0), pool.stride(1), False)
        page, row, group, _ = pool.stride()
        tokens = pool.shape[1]
        return cls(tokens, page, row, group, page != tokens * row)


def _distance(first: Tensor, second: Tensor) -> int:
    """Elements from the first tensor's start to the second's: the kernels address both from one pointer."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


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
) -> tuple[Tensor, Tensor]:
    """See `baige_device/ops/sparse_attention/contract.py`. Launches one kernel, or two when it splits the lists."""
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
            _fp8(q, k_rows, indices, extra_k, extra_indices, scale, out, lse)
        else:
            _plain(q, k_rows, v_rows, indices, extra_k, extra_v, extra_indices, scale, width, out, lse)
    return out, lse


def _offset_type(pools: tuple[Tensor, ...], extra: bool) -> tl.dtype:
    """int32 when the offsets of one pool fit: half the registers of 64-bit addresses. A second pool lies anywhere."""
    reach = max(
        sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True)) for pool in pools
    )
    return tl.int64 if extra or reach >= 2**31 - 1 else tl.int32


def partial_buffers(splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `[S, T, H, Dv]` and `[S, T, H]` for the parts of a split call; the outputs themselves for one part."""
    if splits == 1:
        return out.unsqueeze(0), lse.unsqueeze(0)
    part_out = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return part_out, torch.empty((splits, *lse.shape), dtype=torch.float32, device=out.device)


def merge_splits(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the parts of a split call into its outputs; nothing to do for one part."""
    splits, (tokens, heads, width) = part_out.shape[0], out.shape
    if splits == 1:
        return
    merge_splits_kernel[(tokens * heads,)](
        part_out,
        part_lse,
        out,
        lse,
        tokens * heads,
        heads,
        *out.stride()[:2],
        *lse.stride(),
        WIDTH=width,
        WIDTH_BLOCK=power_of_2(width),
        SPLITS=splits,
        SPLITS_BLOCK=power_of_2(splits),
        num_warps=4 if width > 128 else 1,
    )


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
        _distance(k, extra_k),
        xk_pool.page,
        xk_pool.row,
        xk_pool.group,
        _distance(v_tensor, xv_tensor),
        xv_pool.page,
        xv_pool.row,
        xv_pool.group,
        _distance(indices, extra_indices),
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
        OFFSET=_offset_type((k, v_tensor), extra_count > 0),
        DOT=dot,
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    merge_splits(part_out, part_lse, out, lse)


def _plain_tiles(heads: int, width: int, single: bool) -> Tiles:
    """Block shapes by query heads of one kv head and columns; the 512-column shapes fill Hopper's shared memory."""
    if INTERPRET:
        return Tiles(16, 16, 4, 1, 1)
    if single:
        return Tiles(16, 16, 4, 2, 1)
    if heads > 32:
        return Tiles(64, 64, 8, 2, 1) if width > 256 else Tiles(64, 64, 4, 3, 2)
    block = 16 if heads <= 16 else 32
    if width <= 256:
        return Tiles(block, 64, 4, 3, 3)
    return Tiles(16, 32, 4, 3, 2) if heads <= 16 else Tiles(32, 64, 8, 2, 1)


def _fp8(
    q: Tensor,
    pool: Tensor,
    indices: Tensor,
    extra_pool: Tensor,
    extra_indices: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    tokens, heads, _ = q.shape
    dot = dot_dtype(torch.empty(0, dtype=torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32))
    tiles = _fp8_tiles(heads, str(dot) == "fp32")
    block_count = -(-heads // tiles.heads)
    strides, extra_strides = Pool.of(pool), Pool.of(extra_pool)
    aligned = _rows_aligned(pool) and _rows_aligned(extra_pool)
    count, extra_count = indices.shape[2], extra_indices.shape[2]
    programs = tokens * block_count
    total = -(-count // tiles.rows) + -(-extra_count // tiles.rows)
    splits = best_splits(programs, total, processors(q.device) * tiles.resident)
    part_out, part_lse = partial_buffers(splits, out, lse)
    sparse_fp8_kernel[(programs, splits)](
        q,
        pool.view(torch.float8_e4m3fn),
        pool.view(torch.float32) if aligned else pool,
        pool.view(torch.bfloat16) if aligned else pool,
        indices,
        part_out,
        part_lse,
        *q.stride()[:2],
        strides.page,
        strides.row,
        indices.stride(0),
        indices.stride(2),
        count,
        strides.page_tokens,
        _distance(pool, extra_pool),
        extra_strides.page,
        extra_strides.row,
        _distance(indices, extra_indices),
        extra_indices.stride(0),
        extra_indices.stride(2),
        extra_count,
        extra_strides.page_tokens,
        *part_out.stride()[:3],
        *part_lse.stride(),
        scale * LOG2_E,
        heads,
        block_count,
        -(-total // splits),
        BLOCK_H=tiles.heads,
        ROWS=tiles.rows,
        PAGED=strides.paged or extra_strides.paged,
        EXTRA=extra_count > 0,
        ALIGNED=aligned,
        OFFSET=_offset_type((pool,), extra_count > 0),
        DOT=dot,
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    merge_splits(part_out, part_lse, out, lse)


def _rows_aligned(pool: Tensor) -> bool:
    """Whether every row starts on a multiple of 4 bytes, as fp32 scales need for one load."""
    return pool.data_ptr() % 4 == 0 and all(stride % 4 == 0 for stride in pool.stride()[:-2])


def _fp8_tiles(heads: int, single: bool) -> Tiles:
    if INTERPRET:
        return Tiles(16, 16, 4, 1, 1)
    if single:
        return Tiles(16, 16, 4, 2, 1)
    # Decoding fp8 costs more than the products of padding heads: the warp-group shape wins above 16 heads already.
    return Tiles(64, 64, 8, 2, 1) if heads > 16 else Tiles(16, 32, 4, 2, 2)
