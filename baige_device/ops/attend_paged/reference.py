"""Reference of `attend_paged`: plain torch, fp32 inside, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend_paged", "read_pages", "softmax_average"]

_TILE_LOGITS = 1 << 20
"""Logits that one tile of queries holds (4 MiB in fp32): measured 2-3 times faster than tiles that leave the cache."""


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
    """See the contract. Reads the lengths on the host, so it cannot be captured in a graph."""
    tokens, heads, _ = q.shape
    width = v_dim if v_cache is None else v_cache.shape[3]
    out = q.new_empty(tokens, heads, width) if out is None else out
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if lse is None else lse
    out.zero_()
    lse.fill_(-torch.inf)
    starts = q_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        # A query beyond the length stands before position 0: it sees nothing and keeps its zeros.
        queries = min(starts[row + 1] - starts[row], length)
        if queries < 1:
            continue
        rows = slice(starts[row + 1] - queries, starts[row + 1])
        start = max(0, length - queries - window + 1) if window else 0
        k = read_pages(k_cache, block_table[row], start, length).float()
        v = k[..., :width] if v_cache is None else read_pages(v_cache, block_table[row], start, length).float()
        out[rows], lse[rows] = _attend_request(
            q[rows].float() * scale,
            k,
            v,
            length - queries - start,
            causal=causal,
            window=window,
            soft_cap=logits_soft_cap,
        )
    return out, lse


def read_pages(cache: Tensor, pages: Tensor, start: int, stop: int) -> Tensor:
    """Copy tokens `start:stop` of one request out of a paged cache `[P, N, ...]`: `[stop - start, ...]`.

    `pages` is the request's row of the block table; only the pages that hold the tokens are read.
    """
    page_tokens = cache.shape[1]
    first = start // page_tokens
    used = pages[first : -(-stop // page_tokens)].long()
    one_byte = cache.element_size() == 1  # index kernels of the 8-bit floats are missing in older torch
    source = cache.view(torch.uint8) if one_byte else cache
    tokens = source.index_select(0, used).flatten(0, 1)[start - first * page_tokens : stop - first * page_tokens]
    return tokens.view(cache.dtype) if one_byte else tokens


def softmax_average(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of `logits` `[..., R, S]` over S, applied to `v` `[..., S, Dv]`; also the log-sum-exp `[..., R]`.

    A row of -inf logits gives 0 and -inf.
    """
    lse = torch.logsumexp(logits, -1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(logits - shift.unsqueeze(-1)) @ v, lse


def _attend_request(
    q: Tensor, k: Tensor, v: Tensor, position: int, *, causal: bool, window: int, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """Attend scaled queries `[t, H, D]` over keys `[S, G, D]`; the first query stands at key `position`."""
    (queries, heads, dim), (keys, groups, _) = q.shape, k.shape
    tile = max(1, _TILE_LOGITS // (heads * keys))
    if queries > 1 and not bool(torch.isfinite(v).all()):
        tile = 1  # one query reads exactly its own keys, so a NaN behind the mask cannot reach it
    averages, totals = [], []
    for lo in range(0, queries, tile):
        count = min(tile, queries - lo)
        first = max(0, position + lo - window + 1) if window else 0
        last = position + lo + count if causal else keys
        grouped = q[lo : lo + count].reshape(count, groups, -1, dim).permute(1, 2, 0, 3)
        logits = grouped.reshape(groups, -1, dim) @ k[first:last].permute(1, 2, 0)
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if count > 1 and (causal or window):
            hidden = _hidden(position + lo, count, first, last, causal, window)
            logits.view(groups, -1, count, last - first).masked_fill_(hidden.to(q.device), -torch.inf)
        average, total = softmax_average(logits, v[first:last].transpose(0, 1))
        averages.append(average.view(heads, count, -1).transpose(0, 1))
        totals.append(total.view(heads, count).T)
    return torch.cat(averages), torch.cat(totals)


def _hidden(position: int, queries: int, first: int, last: int, causal: bool, window: int) -> Tensor:
    """bool `[queries, last - first]`: which keys a query does not see."""
    own = torch.arange(position, position + queries).unsqueeze(1)
    other = torch.arange(first, last)
    hidden = (other > own) if causal else torch.zeros(queries, last - first, dtype=torch.bool)
    return hidden | (other <= own - window) if window else hidden
