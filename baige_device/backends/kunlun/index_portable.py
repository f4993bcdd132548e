"""`index_topk` for 16-bit and 32-bit keys in vendor-neutral torch: the vendor's indexer kernels are int8 only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baige_device.backends.kunlun.batch import Batch, read_batch
from baige_device.backends.kunlun.limits import INDEX_LOGITS_BYTES
from baige_device.errors import ContractError

__all__ = ["index_topk"]


def index_topk(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    k_scales: Tensor | None = None,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """See the contract; no float8. Reads the lengths (see `normalise.host_twins`); fp32 products.

    One batched product when no request has more than one query, else one product a request.
    """
    if q.dtype == torch.float8_e4m3fn:
        raise ContractError("index_topk", "q.dtype", "a dtype other than float8 (Kunlun has none)", str(q.dtype))
    batch = read_batch(q_starts, seq_lens)
    found = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for low, high, first, last in _pieces(batch, q.shape[1]):
        length = max(batch.seq_lens[first:last])
        if length == 0:
            continue
        request = (batch.request_of_token[low:high] - first).to(q.device)
        keys, scales = _keys(k_cache, k_scales, block_table[first:last], length)
        scores = _scores(q[low:high].float(), weights[low:high], keys, request)
        if scales is not None:
            scores = scores * scales[request]
        own = batch.last_position[low:high].to(q.device).unsqueeze(1)
        hidden = torch.arange(length, device=q.device) > own
        best = scores.masked_fill(hidden, -math.inf).topk(min(topk, length), dim=1, sorted=False).indices
        found[low:high, : best.shape[1]] = torch.where(best <= own, best, -1).to(torch.int32)
    return found if out is None else out.copy_(found)


def _pieces(batch: Batch, heads: int) -> list[tuple[int, int, int, int]]:
    """(first token, end token, first request, end request): whole batches of decode, else single requests in tiles."""
    step = max(1, INDEX_LOGITS_BYTES.value // (4 * heads * max(1, batch.longest)))
    starts, requests = batch.q_starts, len(batch.seq_lens)
    if batch.most_queries <= 1 and requests <= step:
        return [(0, batch.tokens, 0, requests)] if batch.tokens else []
    return [
        (low, min(low + step, starts[row + 1]), row, row + 1)
        for row in range(requests)
        for low in range(starts[row], starts[row + 1], step)
    ]


def _keys(k_cache: Tensor, k_scales: Tensor | None, table: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """fp32 keys `[b, length, Di]` and factors `[b, length]`; blocks that a shorter request lacks read page 0."""
    page_tokens = k_cache.shape[1]
    blocks = -(-length // page_tokens)
    pages = table[:, :blocks].long()
    pages = torch.where((pages >= 0) & (pages < k_cache.shape[0]), pages, 0)
    keys = k_cache[pages].flatten(1, 2)[:, :length].float()
    return keys, None if k_scales is None else k_scales[pages].flatten(1, 2)[:, :length]


def _scores(q: Tensor, weights: Tensor, keys: Tensor, request: Tensor) -> Tensor:
    """fp32 `[t, length]`. One request's keys serve all its queries; otherwise every query has its own."""
    products = q @ (keys[0].T if keys.shape[0] == 1 else keys[request].transpose(1, 2))
    return (weights.unsqueeze(1) @ torch.relu(products)).squeeze(1)
