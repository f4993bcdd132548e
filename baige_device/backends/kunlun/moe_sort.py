"""The vendor's token permutation: which row each (token, choice) gets when tokens are sorted by expert.

Expert id -1 is out of range for these kernels. It becomes one more expert behind the real ones, whose rows nobody uses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, vendor
from baige_device.backends.kunlun.limits import MOE_SMALL_CHOICES, MOE_STATISTIC_ROWS

__all__ = ["Sorted", "live_choice", "sort_by_expert", "without_negative", "without_repeats"]


class Sorted(NamedTuple):
    """Tokens in expert order, experts 0 to E-1 and then the choices that take no part."""

    rows: Tensor
    """`[R*k, H]`: the payload's rows."""
    row_of: Tensor
    """int32 `[R, k]`: the row of each (token, choice)."""
    starts: Tensor
    """int32 `[E+1]`: first row of each expert; the last entry ends the last expert."""


def sort_by_expert(x: Tensor, ids: Tensor, experts: int) -> Sorted:
    """x bf16 or fp16 `[R, H]`, ids int32 `[R, k]` in `[-1, experts)`. R and k are at least 1. No sync."""
    tokens, choices = ids.shape
    total = experts + 1
    chosen = without_negative(ids, experts)
    if tokens * choices <= MOE_SMALL_CHOICES.value:
        index, starts, rows = vendor.speed_ops().moe_pre_small(
            chosen, total, index_have_neg=False, sort_mode=True, x=normalise.dense(x)
        )
        return Sorted(rows, index.view(tokens, choices), starts[:total])
    statistic = normalise.zeros((MOE_STATISTIC_ROWS.value, total), torch.int32, x.device)
    rows = normalise.zeros((tokens * choices, x.shape[1]), x.dtype, x.device)
    index = normalise.zeros((tokens * choices,), torch.int32, x.device)
    counts = normalise.zeros((total,), torch.int32, x.device)
    starts = normalise.zeros((total + 1,), torch.int32, x.device)
    kernels = vendor.kernel_module()
    kernels.gen_block_statistic(chosen, statistic)
    kernels.moe_pre_sorted(normalise.dense(x), chosen, statistic, rows, index, counts, starts)
    return Sorted(rows, index.view(tokens, choices), starts[:total])


def without_negative(ids: Tensor, experts: int) -> Tensor:
    """int32 ids with -1 replaced by the spare expert behind the real ones."""
    return normalise.int32(torch.where(ids >= 0, ids, experts))


def without_repeats(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """An expert that a token names twice: the first choice keeps the sum of the weights, the others become -1."""
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (ids >= 0).unsqueeze(2)
    first = ~same.tril(-1).any(2)
    summed = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    live = first & (ids >= 0)
    return torch.where(live, ids, -1), torch.where(live, summed, 0.0)


def live_choice(index: Tensor, live: Tensor) -> Tensor:
    """`[R, k]` rows in which a dead choice points to a live one of the same token (its weight is 0), so that rows of
    padding are never read; row 0 for a token without any live choice."""
    first = index.gather(1, live.to(torch.int32).argmax(1, keepdim=True))
    return torch.where(live, index, torch.where(live.any(1, keepdim=True), first, 0))
