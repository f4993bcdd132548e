"""Attention over a hot buffer: after the swap, or on the hits while the misses fly, merged by LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.optimizations.hisparse.cache import HotKVCache, SwapIn
from baige_device.registry.table import OpTable

__all__ = ["attend_hot"]


def attend_hot(
    cache: HotKVCache,
    ops: OpTable,
    layer: int,
    q: Tensor,
    swap: SwapIn,
    *,
    scale: float,
    v_dim: int,
    kv_format: str = "plain",
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """MLA attention of `q` `[T, H, D]` over the rows of `swap`; returns (out `[T, H, v_dim]`, lse `[T, H]`).

    With `overlap` the hits are attended before the transfer is joined and the misses after it; the results are merged.
    That hides the transfer behind attention at the price of a second launch and a merge (the third HiSparse point of
    Baidu's talk). `kv_format` `plain` reads the rows as q's dtype.
    """
    pool = cache.hot[layer][:, None]
    rows = pool if kv_format == "fp8_ds_mla" else pool.view(q.dtype)
    indices = swap.rows[:, None]

    def attend(chosen: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = ops.sparse_attention(
            q, rows, None, chosen, scale=scale, v_dim=v_dim, kv_format=kv_format
        )
        return result

    if not overlap:
        cache.join(swap)
        return attend(indices)
    missed = swap.missed(cache.hot.shape[1])[:, None]
    hits = attend(torch.where(missed, -1, indices))
    cache.join(swap)
    misses = attend(torch.where(missed, indices, -1))
    merged: tuple[Tensor, Tensor] = ops.merge_attention(*hits, *misses)
    return merged
