"""Attention over a hot buffer: after the swap, or on the hits while the misses fly, merged by LSE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baige_device.optimizations.hisparse.cache import HotKVCache
from baige_device.optimizations.hisparse.swap import SwapIn
from baige_device.registry.table import OpTable

__all__ = ["attend_hot"]

_Result = tuple[Tensor, Tensor]


def attend_hot(
    cache: HotKVCache,
    ops: OpTable,
    layer: int,
    q: Tensor,
    swap: SwapIn | Sequence[SwapIn],
    *,
    scale: float,
    v_dim: int,
    kv_format: str = "plain",
    overlap: bool = False,
    miss_width: int = 0,
) -> tuple[Tensor, Tensor]:
    """MLA attention of `q` `[T, H, D]` over the rows of `swap`; returns (out `[T, H, v_dim]`, lse `[T, H]`).

    With `overlap` the hits are attended before the transfer is joined and the misses after it, wave by wave; the
    results are merged. That hides the transfer behind attention at the price of a second launch and a merge (the third
    HiSparse point of Baidu's talk).

    Args:
        swap: one swap-in of all T queries, or several of consecutive ones (`HotKVCache.swap_in(part=...)`). With
            `max_sms`, attention of the hits leaves the cores of the transfer alone (`reserved_sms`).
        kv_format: `plain` reads the rows as q's dtype.
        miss_width: with `overlap`, attend the misses through lists of so many entries instead of K. The caller knows
            that no query misses more and that no two queries belong to one request; the device stops where it is wrong.
    """
    swaps = (swap,) if isinstance(swap, SwapIn) else tuple(swap)
    pool = cache.hot[layer][:, None]
    rows = pool if kv_format == "fp8_ds_mla" else pool.view(q.dtype)

    def attend(part: Tensor, chosen: Tensor, copying_sms: int = 0) -> _Result:
        result: _Result = ops.sparse_attention(
            part, rows, None, chosen[:, None], scale=scale, v_dim=v_dim, kv_format=kv_format, reserved_sms=copying_sms
        )
        return result

    if not overlap:
        for one in swaps:
            cache.join(one)
        return attend(q, _joined([one.rows for one in swaps]))
    missed = [one.missed() for one in swaps]
    hits = [one.rows.masked_fill(flying, -1) for one, flying in zip(swaps, missed, strict=True)]
    late = [_late(one, flying, miss_width) for one, flying in zip(swaps, missed, strict=True)]
    out, lse = attend(q, _joined(hits), max(one.copying_sms() for one in swaps))
    start = 0
    for one, flying, lists in zip(swaps, missed, late, strict=True):
        if miss_width:
            one.check_compact(flying, miss_width)
        first = start
        for number, wave in enumerate(one.waves):
            stop = first + wave.stop
            part = slice(start, stop)
            cache.join(one, number)
            misses = attend(q[part], lists[start - first : stop - first], one.copying_sms(number + 1))
            ops.merge_attention(out[part], lse[part], *misses, out=out[part], lse=lse[part])
            start = stop
    return out, lse


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _late(swap: SwapIn, missed: Tensor, width: int) -> Tensor:
    """The rows in flight: int32 `[T, width]` compact, or in their places of `[T, K]`."""
    if width:
        return swap.landing()[:, :width].contiguous()
    return torch.where(missed, swap.rows, -1)
