"""Launches of sparse MLA attention over 656-byte fp8 rows: one kernel for few heads, one for many or unaligned rows."""

from __future__ import annotations

import torch
import triton.language as tl
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
from baige_device.backends.portable.float_codec import has_native_e4m3
from baige_device.backends.portable.runtime import INTERPRET, best_splits, dot_dtype, processors
from baige_device.backends.portable.sparse_fp8_few_kernels import sparse_fp8_few_kernel
from baige_device.backends.portable.sparse_fp8_kernels import sparse_fp8_kernel

__all__ = ["attend_fp8_rows"]

_FEW_HEADS = 32


def attend_fp8_rows(
    q: Tensor,
    pool: Tensor,
    indices: Tensor,
    extra_pool: Tensor,
    extra_indices: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend `q [T, H, 576]` over `[S, 1, 656]` or paged rows into `out [T, H, 512]` and `lse [T, H]`."""
    tokens, heads, _ = q.shape
    dot = dot_dtype(torch.empty(0, dtype=torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32))
    aligned = _rows_aligned(pool) and _rows_aligned(extra_pool)
    few = heads <= _FEW_HEADS and aligned and q.dtype == torch.bfloat16
    tiles = _few_heads_tiles(heads) if few else _fp8_tiles(heads, str(dot) == "fp32")
    block_count = -(-heads // tiles.heads)
    strides, extra_strides = Pool.of(pool), Pool.of(extra_pool)
    count, extra_count = indices.shape[2], extra_indices.shape[2]
    programs = tokens * block_count
    total = -(-count // tiles.rows) + -(-extra_count // tiles.rows)
    splits = best_splits(programs, total, processors(q.device) * tiles.resident)
    part_out, part_lse = partial_buffers(splits, out, lse)
    shared = (
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
        distance(pool, extra_pool),
        extra_strides.page,
        extra_strides.row,
        distance(indices, extra_indices),
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
    )
    options = {
        "BLOCK_H": tiles.heads,
        "ROWS": tiles.rows,
        "PAGED": strides.paged or extra_strides.paged,
        "EXTRA": extra_count > 0,
        "OFFSET": offset_type((pool,), extra_count > 0),
        "DOT": dot,
        "PRECISION": "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    scales = pool.view(torch.float32) if aligned else pool
    rope = pool.view(torch.bfloat16) if aligned else pool
    if few:
        half = tl.float32 if INTERPRET else tl.float16
        native = has_native_e4m3(q.device) and torch.version.hip is None
        codes = pool.view(torch.uint8)
        sparse_fp8_few_kernel[(programs, splits)](q, codes, scales, rope, *shared, HALF=half, NATIVE=native, **options)
    else:
        latent = pool.view(torch.float8_e4m3fn)
        sparse_fp8_kernel[(programs, splits)](
            q, latent, scales, rope, *shared, ALIGNED=aligned, APART=tiles.apart, **options
        )
    merge_splits(part_out, part_lse, out, lse)


def _rows_aligned(pool: Tensor) -> bool:
    """Whether every row starts on a multiple of 4 bytes, as fp32 scales need for one load."""
    return pool.data_ptr() % 4 == 0 and all(stride % 4 == 0 for stride in pool.stride()[:-2])


def _few_heads_tiles(heads: int) -> Tiles:
    """No wider than the matrix instruction's 16 heads where that is enough; 64 rows fill a warp-group product."""
    if INTERPRET:
        return Tiles(16, 16, 4, 1, 1)
    return Tiles(16 if heads <= 16 else 32, 64, 4, 1, 2)


def _fp8_tiles(heads: int, single: bool) -> Tiles:
    if INTERPRET:
        return Tiles(16, 16, 4, 1, 1, apart=True)
    if single:
        return Tiles(16, 16, 4, 2, 1)
    return Tiles(64, 64, 8, 2, 1, apart=True) if heads > 16 else Tiles(16, 32, 4, 2, 2)
