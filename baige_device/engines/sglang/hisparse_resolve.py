"""SGLang's bookkeeping of one HiSparse layer, updated by `hot_cache_resolve` exactly as by SGLang's CUDA kernel.

SGLang's tables are passed to the op as views: `device_buffer_tokens[:, :H]` are its slot keys, `lru_slots` its order.
What the op leaves open, the order of the used slots, is put into SGLang's form afterwards: untouched, misses, hits.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Resolved", "Step", "Tables", "entries", "make_step", "resolve", "write_rows"]


class Tables(NamedTuple):
    """Per-request state of one layer; R request rows, H hot slots, slot H holds the newest token."""

    device_buffer_tokens: Tensor
    """int32 `[R, H + page]`: the token in each slot, -1 empty. Updated."""
    device_buffer_locs: Tensor
    """int32 `[R, H + page]`: row of the device pool of each slot."""
    host_cache_locs: Tensor
    """int64 `[R, C]`: row of the host pool of each token, -1 for none."""
    lru_slots: Tensor
    """int16 `[R, H]`: the slots, least recently used first. Updated."""


class Step(NamedTuple):
    """B requests of a step. Rows that are not `real` pad a graph and take no part."""

    tokens: Tensor
    """int32 `[B, N]`: the wanted tokens; negative ones and those past the length are padding."""
    requests: Tensor
    """int64 `[B]`: row of the tables."""
    seq_lens: Tensor
    """int64 `[B]`, the new token included."""
    real: Tensor
    """bool `[B]`."""


class Resolved(NamedTuple):
    """Where the wanted tokens are once the misses have been copied."""

    locs: Tensor
    """int32 `[B, N]`: rows of the device pool, -1 for padding."""
    missed: Tensor
    """bool `[B, N]`: entries whose row is still to be copied."""
    miss_src: Tensor
    """int64 `[B, N]`: rows of the host pool to copy, compact, -1 behind the count."""
    miss_dst: Tensor
    """int32 `[B, N]`: their rows of the device pool."""
    miss_counts: Tensor
    """int32 `[B]`."""
    hit_counts: Tensor
    """int64 `[B]`: distinct tokens that were in their hot slots."""


def make_step(tokens: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, num_real_reqs: Tensor | None) -> Step:
    """The arguments of SGLang's kernels; `num_real_reqs` is a one-element tensor of the device, None means all."""
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    real = rows < (tokens.shape[0] if num_real_reqs is None else num_real_reqs)
    return Step(tokens.int(), req_pool_indices.long(), seq_lens.long(), real)


def resolve(tables: Tables, step: Step, ops: Any) -> Resolved:
    """Look the wanted tokens up, evict for the misses, and list what has to be copied.

    A request of at most H tokens holds them all, in order, and misses nothing. In a longer one the newest token is in
    slot H, outside the LRU order, and the others are looked up.
    """
    hot_tokens = tables.lru_slots.shape[1]
    tokens, requests, seq_lens, real = step
    inside = (tokens >= 0) & (tokens < seq_lens[:, None]) & real[:, None]
    long = real & (seq_lens > hot_tokens)
    newest = long[:, None] & (tokens == seq_lens[:, None] - 1)
    wanted = torch.where(inside & long[:, None] & ~newest, tokens, -1)
    before = tables.lru_slots[requests].long()

    plan = ops.hot_cache_resolve(
        wanted,
        torch.where(long, requests, -1),
        tables.device_buffer_tokens[:, :hot_tokens],
        tables.lru_slots,
    )
    used, loaded = _mark(plan.slots, hot_tokens), _mark(plan.miss_slots, hot_tokens)
    recency = used.int() + (used & ~loaded).int()  # 0 untouched, 1 loaded now, 2 hit
    order = before.gather(1, recency.gather(1, before).argsort(dim=1, stable=True))
    write_rows(tables.lru_slots, torch.where(long, requests, -1), order.to(tables.lru_slots.dtype))

    slots = torch.where(long[:, None], plan.slots, tokens)
    slots = torch.where(inside, torch.where(newest, hot_tokens, slots), -1)
    looked_up = torch.where(wanted >= 0, plan.slots, -1)
    return Resolved(
        locs=entries(tables.device_buffer_locs, requests, slots),
        missed=(looked_up >= 0) & loaded.gather(1, looked_up.clamp_min(0).long()),
        miss_src=entries(tables.host_cache_locs, requests, plan.miss_keys),
        miss_dst=entries(tables.device_buffer_locs, requests, plan.miss_slots),
        miss_counts=plan.miss_counts,
        hit_counts=(recency == 2).sum(1),
    )


def entries(table: Tensor, requests: Tensor, columns: Tensor) -> Tensor:
    """`table[requests[b], columns[b, n]]` as `[B, N]`, -1 where the column is."""
    found = table[requests[:, None], columns.clamp_min(0).long()]
    return torch.where(columns < 0, -1, found)


def write_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """`table[rows[b]] = values[b]`; -1 writes nothing. Shapes hang on no value, so nothing waits and graphs capture it.

    An entry that must not write repeats the write of the first one that does, or rewrites row 0 when there is none.
    """
    if rows.numel() == 0:
        return
    writes = rows >= 0
    first = writes.int().argmax().view(1)
    some = writes.any()
    spare_row = torch.where(some, rows[first], 0)
    spare = torch.where(some, values[first], table[:1])
    table.index_put_((torch.where(writes, rows, spare_row),), torch.where(writes[:, None], values, spare))


def _mark(slots: Tensor, hot_tokens: int) -> Tensor:
    """bool `[B, H]`: which slots a row names; -1 names none."""
    marks = torch.zeros(slots.shape[0], hot_tokens + 1, dtype=torch.bool, device=slots.device)
    marks.scatter_(1, torch.where(slots < 0, hot_tokens, slots).long(), True)
    return marks[:, :hot_tokens]
