"""Dense MLA attention out of the sparse kernels: the list of a query is every row it sees, cut into kernel widths.

The vendor's dense MLA decode (`paged_attention`) returns no LSE, which the contract demands; the sparse kernels do, and
their parts merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.kunlun import partial, sparse
from baige_device.backends.kunlun.batch import Batch
from baige_device.backends.kunlun.limits import SPARSE_TOPK

__all__ = ["attend"]


def attend(
    q: Tensor, cache: Tensor, block_table: Tensor, batch: Batch, scale: float, causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """q `[T, H, 576]` over the latent cache `[P, N, 576]`; T is the batch's tokens."""
    request = batch.request_of_token.to(q.device)
    own = batch.last_position.to(q.device)
    length = torch.tensor(batch.seq_lens, device=q.device)[request]
    stop = own + 1 if causal else torch.where(own >= 0, length, 0)
    start = (own - window + 1).clamp(min=0) if window else torch.zeros_like(own)
    parts = []
    for low in range(0, batch.longest, SPARSE_TOPK.value):
        lists = _lists(cache, block_table, request, start, stop, low, min(low + SPARSE_TOPK.value, batch.longest))
        pool, pointers = sparse.latent_rows(cache.unsqueeze(2), lists)
        parts.append(sparse.attend_lists(q, pool, pointers, scale))
    result, total = parts[0]
    for part in parts[1:]:
        result, total = partial.merge(result, total, *part)
    return result, total


def _lists(
    cache: Tensor, block_table: Tensor, request: Tensor, start: Tensor, stop: Tensor, low: int, high: int
) -> Tensor:
    """int64 `[T, high - low]`: the row of each position, -1 where the query does not see it."""
    page_tokens = cache.shape[1]
    position = torch.arange(low, high, device=cache.device)
    page = block_table[:, (position // page_tokens).clamp(max=block_table.shape[1] - 1)].long()
    slots = (page * page_tokens + position % page_tokens)[request]
    visible = (position >= start.unsqueeze(1)) & (position < stop.unsqueeze(1))
    return torch.where(visible, slots, -1)
