"""FlashMLA's split plan for fp8 decoding, made anew so that some of its parts get no work.

A plan deals the lists' blocks of 64 rows evenly among parts; a part is a cluster of multiprocessors. Where a copy holds
one multiprocessor of a cluster, that part starts only when another one ends, and the call takes twice as long (H200,
batch 128: 178 us alone, 357 us beside a copy on 4 multiprocessors, 222 us when 4 parts get nothing).

The plan's layout is FlashMLA's own: int32 `[parts, 8]` of first and last query, first and end block, first split, and
whether the first and the last query are split; and int32 `[T + 1]` splits before each query. What is not laid out like
that is left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK_ROWS", "leave_parts_free", "split_plan"]

BLOCK_ROWS = 64
_OVERHEAD_BLOCKS = 5
"""What starting a query costs, in blocks."""
_FIELDS = 7


def leave_parts_free(plan: Tensor, splits: Tensor, tokens: int, blocks: int, free: int) -> tuple[Tensor, Tensor] | None:
    """FlashMLA's plan of `tokens` queries of `blocks` blocks without its last `free` parts; waits for the device.

    At most half of the parts are left out. None when `plan` and `splits` are not what FlashMLA is known to make.
    """
    if plan.dtype != torch.int32 or plan.dim() != 2 or plan.shape[1] < _FIELDS or splits.shape != (tokens + 1,):
        return None
    parts = plan.shape[0]
    own = split_plan(tokens, blocks, parts, parts)
    if own is None or not torch.equal(own[1], splits.cpu()):
        return None
    live = own[0][:, 0] < tokens
    if not torch.equal(own[0][live][:, :_FIELDS], plan.cpu()[live][:, :_FIELDS]):
        return None
    made = split_plan(tokens, blocks, parts - min(free, parts // 2), parts)
    if made is None:
        return None
    rows = torch.zeros_like(plan)
    rows[:, :_FIELDS] = made[0].to(plan.device)
    return rows, made[1].to(splits.device)


def split_plan(tokens: int, blocks: int, parts: int, total: int) -> tuple[Tensor, Tensor] | None:
    """The plan for the first `parts` of `total` parts: int32 `[total, 7]`, splits int32 `[tokens + 1]`."""
    payload = -(-tokens * (blocks + _OVERHEAD_BLOCKS) // parts) + _OVERHEAD_BLOCKS
    rows, splits = [], [0]
    token = block = split = 0
    for _ in range(total):
        first, first_block, first_split = token, block, split
        left = payload
        while token < tokens and left >= blocks - block + _OVERHEAD_BLOCKS:
            left -= blocks - block + _OVERHEAD_BLOCKS
            splits.append(splits[-1] + split + 1)
            token, block, split = token + 1, 0, 0
        if token < tokens and left > _OVERHEAD_BLOCKS:
            block, split = block + left - _OVERHEAD_BLOCKS, split + 1
        last, end = (token, block) if block > 0 else (token - 1, blocks)
        cut = (int(first_block != 0), int(end != blocks))
        if first == last:
            cut = (max(cut), max(cut))
        rows.append((first, last, first_block, end, first_split, *cut))
    if token < tokens:
        return None
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)
