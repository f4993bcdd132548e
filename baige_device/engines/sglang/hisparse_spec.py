"""SGLang's swap-in for speculative decoding: the tokens of all steps of a request at once.

Together the steps may want more tokens than the hot buffer holds; those that find no room are copied into the request's
scratch rows, for this call only. SGLang's kernel chooses victims by an approximate CLOCK with atomics; here the order
is exact LRU, kept in the rows that SGLang reserves for the CLOCK's reference epochs (`cache_policy[1:]`), with the
CLOCK's packed state (`cache_policy[0]`) as the mark that a row's order is set up. SGLang zeroes both when a request
starts and reads neither. The hash banks (`cache_index`) are not used: `device_buffer_tokens` is what they index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baige_device.activation import current
from baige_device.engines.sglang.hisparse_counts import COUNTS
from baige_device.engines.sglang.hisparse_resolve import Step, Tables, entries, resolve, write_rows
from baige_device.engines.sglang.hisparse_rows import token_rows
from baige_device.engines.sglang.hisparse_swap import copy_misses, pair_bytes

__all__ = ["load_cache_to_device_buffer_spec_mla"]


def load_cache_to_device_buffer_spec_mla(
    *,
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    state: Any,
    num_real_reqs: Tensor,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
) -> None:
    """Swap the top-k tokens `[B, S, K]` of S steps in, each token once; `seq_lens` `[B * S]` are the steps' lengths.

    The page behind the hot slots holds the newest tokens: they are found there by their number. Rows of padded requests
    get 0, tokens that do not exist -1, as upstream.
    """
    requests = req_pool_indices.long()
    batch, steps, topk = top_k_tokens.shape
    hot_tokens = state.cache_policy.shape[1]
    real = torch.arange(batch, device=requests.device) < num_real_reqs
    lengths = seq_lens.view(batch, steps, 1).expand(-1, -1, topk).flatten(1)
    tokens = top_k_tokens.flatten(1).int()
    tokens = torch.where((tokens >= 0) & (tokens < lengths) & real[:, None], tokens, -1)
    newest = _newest(tokens, device_buffer_tokens[requests, hot_tokens:].contiguous())
    newest_locs = entries(device_buffer_locs, requests, torch.where(newest < 0, -1, newest + hot_tokens))

    wanted = torch.where(newest_locs >= 0, -1, tokens)
    rank, distinct = _rank_distinct(wanted, topk)
    fits = min(hot_tokens, wanted.shape[1])
    order = _lru_order(state.cache_policy, requests, real)
    tables = Tables(device_buffer_tokens, device_buffer_locs, host_cache_locs, order)
    # No row is short here: every wanted token is looked up, and the newest are none of them.
    everything = torch.full_like(requests, torch.iinfo(torch.int32).max)
    hot = resolve(tables, Step(distinct[:, :fits], requests, everything, real), current().ops)

    over = distinct[:, fits:]
    over_src = entries(host_cache_locs, requests, over)
    over_dst = torch.where(over < 0, -1, state.scratch_locs[requests, : over.shape[1]])
    locs = torch.cat([hot.locs, over_dst.int()], dim=1)
    found = torch.where(rank < 0, newest_locs, locs.gather(1, rank.clamp_min(0)))
    top_k_device_locs.copy_(torch.where(real[:, None], found, 0).view(batch, steps, topk))

    plan = _join(hot.miss_src, hot.miss_dst, hot.miss_counts, over_src, over_dst.int())
    pairs = [(token_rows(host_cache), token_rows(device_buffer))]
    COUNTS.add_lookups(hot.hit_counts, plan[2])
    COUNTS.add_copies(plan[2], pair_bytes(pairs))
    copy_misses(pairs, *plan)
    if miss_src is not None and miss_dst is not None and miss_count is not None:
        width = plan[0].shape[1]
        miss_src[:batch, :width], miss_dst[:batch, :width], miss_count[:batch] = plan


def _newest(tokens: Tensor, page: Tensor) -> Tensor:
    """int64 `[B, N]`: column of `page` `[B, P]` that holds each token, -1 for none."""
    held, column = page.sort(dim=1)
    at = torch.searchsorted(held, tokens.contiguous()).clamp_max(page.shape[1] - 1)
    return torch.where((tokens >= 0) & (held.gather(1, at) == tokens), column.gather(1, at), -1)


def _rank_distinct(wanted: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Number the distinct tokens of each row, those of the last step first, since the next call wants them again.

    Returns the number of each entry, int64 `[B, N]` (-1 for padding), and the tokens by number, `[B, N]`, -1 behind.
    """
    entry_count = wanted.shape[1]
    back = wanted.view(wanted.shape[0], -1, topk).flip(1).flatten(1)
    ordered, source = back.sort(dim=1, stable=True)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    columns = torch.arange(entry_count, device=wanted.device).expand_as(source)
    first = source.gather(1, torch.where(starts, columns, 0).cummax(dim=1).values)
    firsts = torch.zeros_like(source).scatter_(1, source, first)
    heads = (firsts == columns) & (back >= 0)
    number = torch.where(back >= 0, (heads.long().cumsum(1) - 1).gather(1, firsts), -1)
    spare = torch.where(heads, number, entry_count)
    distinct = torch.full((wanted.shape[0], entry_count + 1), -1, dtype=wanted.dtype, device=wanted.device)
    distinct.scatter_(1, spare, back)
    rank = number.view(wanted.shape[0], -1, topk).flip(1).flatten(1)
    return rank, distinct[:, :entry_count]


def _lru_order(policy: Tensor, requests: Tensor, real: Tensor) -> Tensor:
    """The LRU order int32 `[R, H]` inside SGLang's CLOCK state, set up for requests that have none yet."""
    order = policy[1:]
    fresh = real & (policy[0, requests] == 0)
    start = torch.arange(policy.shape[1], dtype=policy.dtype, device=policy.device).expand(requests.shape[0], -1)
    write_rows(order, torch.where(fresh, requests, -1), start)
    marks = policy[0, : order.shape[0], None]
    write_rows(marks, torch.where(real, requests, -1), torch.ones_like(requests, dtype=policy.dtype)[:, None])
    return order


def _join(
    miss_src: Tensor, miss_dst: Tensor, counts: Tensor, over_src: Tensor, over_dst: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One compact plan of both lists; the second one is compact, too, and goes behind the first."""
    batch, width = miss_src.shape[0], miss_src.shape[1] + over_src.shape[1]
    over = (over_dst >= 0).sum(1)
    columns = torch.arange(width, device=miss_src.device).expand(batch, -1)
    behind = columns - counts[:, None]
    padded = torch.nn.functional.pad
    in_over = (behind >= 0) & (behind < over[:, None])
    at = behind.clamp(0, max(over_src.shape[1] - 1, 0))

    def merge(first: Tensor, second: Tensor) -> Tensor:
        first = padded(first, (0, second.shape[1]), value=-1)
        return torch.where(in_over, second.gather(1, at), first) if second.shape[1] else first

    return merge(miss_src, over_src), merge(miss_dst, over_dst), (counts + over).int()
