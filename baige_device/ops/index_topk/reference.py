"""Reference of `index_topk`: plain torch, fp32 inside, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.attend_paged.reference import read_pages

__all__ = ["index_topk"]

_TILE_LOGITS = 1 << 20
"""Logits that one tile of queries holds (4 MiB in fp32): measured 2-3 times faster than tiles that leave the cache."""


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
    """See the contract. Reads the lengths on the host, so it cannot be captured in a graph."""
    out = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device) if out is None else out
    out.fill_(-1)
    starts = q_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        queries = min(starts[row + 1] - starts[row], length)
        if queries < 1:
            continue
        rows = slice(starts[row + 1] - queries, starts[row + 1])
        own = torch.arange(length - queries, length, device=q.device).unsqueeze(1)
        if length <= topk:
            positions = torch.arange(length, device=q.device).expand(queries, -1)
        else:
            k = read_pages(k_cache, block_table[row], 0, length).float()
            if k_scales is not None:
                k = k * read_pages(k_scales, block_table[row], 0, length).unsqueeze(-1)
            positions = _best(q[rows].float(), weights[rows], k, own, topk)
        out[rows, : positions.shape[1]] = positions.masked_fill(positions > own, -1).int()
    return out


def _best(q: Tensor, weights: Tensor, k: Tensor, own: Tensor, topk: int) -> Tensor:
    """The `topk` best keys of `[S, Di]` for each query of `[t, Hi, Di]`; invisible ones only after all visible ones."""
    keys = torch.arange(k.shape[0], device=k.device)
    tile = max(1, _TILE_LOGITS // (q.shape[1] * k.shape[0]))
    best = []
    for lo in range(0, q.shape[0], tile):
        logits = torch.relu(q[lo : lo + tile] @ k.T)
        scores = (weights[lo : lo + tile].unsqueeze(1) @ logits).squeeze(1)
        best.append(scores.masked_fill(keys > own[lo : lo + tile], -torch.inf).topk(topk, dim=1, sorted=False).indices)
    return torch.cat(best)
