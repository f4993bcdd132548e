"""`attend_paged` in Triton: prefill, chunked prefill and split-K decode by one kernel, without host reads."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.portable.attend_paged_kernels import attend_paged_kernel
from baige_device.backends.portable.attention_launch import LOG2_E, Tiles, merge_splits, partial_buffers
from baige_device.backends.portable.runtime import (
    INTERPRET,
    best_splits,
    dot_dtype,
    head_blocks,
    launching_on,
    power_of_2,
    processors,
)

__all__ = ["attend_paged"]

SPLIT_BYTES = 256 << 20
"""Most memory for partial results: above it a batch has enough programs without splitting."""


def attend_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    causal: bool = True,
    window: int = 0,
    logits_soft_cap: float = 0.0,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `baige_device/ops/attend_paged/contract.py`. Launches one kernel, or two when it splits the keys."""
    tokens, heads, dim = q.shape
    groups, requests = k_cache.shape[2], seq_lens.shape[0]
    width = v_dim if v_cache is None else v_cache.shape[3]
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if lse is None else lse
    if tokens == 0 or heads == 0:
        return out, lse
    if requests == 0 or block_table.shape[1] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return out, lse
    q = q if q.stride(2) == 1 else q.contiguous()
    per_group = heads // groups
    blocks = head_blocks(dim)
    shared = v_cache is None and width <= blocks.first
    width_block = blocks.first if shared else power_of_2(width)
    dot = dot_dtype(q, k_cache)
    rows_per_request = per_group * (max_query_tokens or -(-tokens // requests))
    tiles = _tiles(rows_per_request, max(blocks.first, width_block), str(dot) == "fp32")
    programs = (tokens * per_group) // tiles.heads + requests + 1
    splits = _splits(programs * groups, tiles, max_seq_tokens or block_table.shape[1] * k_cache.shape[1], window, out)
    part_out, part_lse = partial_buffers(splits, out, lse)
    v_tensor = k_cache if v_cache is None else v_cache
    with launching_on(q):
        attend_paged_kernel[(programs, groups, splits)](
            q,
            k_cache,
            v_tensor,
            block_table,
            q_starts,
            seq_lens,
            part_out,
            part_lse,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_tensor.stride()[:3],
            *block_table.stride(),
            q_starts.stride(0),
            seq_lens.stride(0),
            *part_out.stride()[:3],
            *part_lse.stride(),
            tokens,
            requests,
            k_cache.shape[1],
            window,
            scale * LOG2_E,
            scale / logits_soft_cap if logits_soft_cap else 0.0,
            logits_soft_cap * LOG2_E,
            splits,
            HEADS=per_group,
            D=dim,
            D0=blocks.first,
            D1=blocks.second,
            WIDTH=width,
            WIDTH_BLOCK=width_block,
            BLOCK_M=tiles.heads,
            BLOCK_N=tiles.rows,
            CAUSAL=causal,
            WINDOW=window > 0,
            SOFT_CAP=logits_soft_cap > 0,
            SHARED=shared,
            DOT=dot,
            PRECISION="ieee",
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        merge_splits(part_out, part_lse, out, lse)
    return out, lse


def _tiles(rows: int, width: int, single: bool) -> Tiles:
    """Block shapes by the (query, head) rows of a typical request and the widest block of columns."""
    if INTERPRET:
        return Tiles(16, 16, 4, 1, 1)
    if single:
        return Tiles(16, 16, 4, 2, 1) if width > 256 else Tiles(16, 32, 4, 2, 2)
    if rows > 32:
        if width > 256:
            return Tiles(64, 64, 8, 2, 1)
        return Tiles(128, 64, 8, 3, 1) if rows > 64 and width > 64 else Tiles(64, 64, 4, 3, 2)
    block = 16 if rows <= 16 else 32
    return Tiles(block, 32, 4, 2, 2) if width > 256 else Tiles(block, 64, 4, 3, 3)


def _splits(programs: int, tiles: Tiles, keys: int, window: int, out: Tensor) -> int:
    """Parts of the key range, for a grid that would leave multiprocessors idle."""
    keys = min(keys, window + tiles.heads) if window else keys
    most = max(1, SPLIT_BYTES // (4 * out.numel()))
    return best_splits(programs, -(-keys // tiles.rows), processors(out.device) * tiles.resident, min(64, most))
