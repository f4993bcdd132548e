"""From router choices to rows: the counting sort behind MoE dispatch, and the movers that follow it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baige_device.backends.portable.moe_kernels import (
    bucket_starts_kernel,
    clear_padding_kernel,
    entry_slots_kernel,
    gather_sum_kernel,
    rank_entries_kernel,
    scan_chunks_kernel,
    scatter_rows_kernel,
)
from baige_device.backends.portable.runtime import INTERPRET, power_of_2, processors

__all__ = ["Routing", "gather_sum", "lay_out", "route"]

_CHUNK_ENTRIES = 16 if INTERPRET else 128
_ROW_BYTES = 2048
"""Bytes of a row that one program moves: 16 a thread. 7168 bf16 columns are 7 such pieces exactly."""


@dataclass(frozen=True)
class Routing:
    """Where each (row, choice) goes. E buckets; rows are those of the bucketed layout."""

    slots: Tensor
    """int32 `[R, k]`, -1 without a bucket."""
    counts: Tensor
    """int32 `[E]`."""
    starts: Tensor
    """int32 `[E + 1]`, first row of each bucket."""


def route(ids: Tensor, first_id: int, buckets: int, *, alignment: int = 1, capacity: int = 0) -> Routing:
    """Sort the choices `ids [R, k]` stably into `buckets` from `first_id` on; other ids take no part.

    Buckets follow each other padded to `alignment`, or start at multiples of `capacity` > 0. Does not synchronise.
    """
    device = ids.device
    rows, choices = ids.shape
    entries = rows * choices
    chunks = -(-entries // _CHUNK_ENTRIES)
    slots = torch.empty((rows, choices), dtype=torch.int32, device=device)
    counts = torch.empty((buckets,), dtype=torch.int32, device=device)
    starts = torch.empty((buckets + 1,), dtype=torch.int32, device=device)
    ranks = torch.empty((entries,), dtype=torch.int32, device=device)
    histogram = torch.zeros((chunks, buckets), dtype=torch.int32, device=device)
    choice = (ids.stride(0), ids.stride(1), first_id, buckets)
    if entries:
        rank_entries_kernel[(chunks,)](ids, ranks, histogram, entries, *choice, choices, _CHUNK_ENTRIES)
    block = min(16, power_of_2(buckets, 1))
    scan_chunks_kernel[(-(-buckets // block),)](histogram, counts, chunks, buckets, BLOCK_C=128, BLOCK_B=block)
    bucket_starts_kernel[(1,)](
        counts, starts, buckets, alignment, capacity, BLOCK=power_of_2(buckets + 1, 1), FIXED=capacity > 0
    )
    if entries:
        entry_slots_kernel[(chunks,)](
            ids, ranks, histogram, starts, slots, entries, *choice, CHOICES=choices, BLOCK=_CHUNK_ENTRIES
        )
    return Routing(slots, counts, starts)


def lay_out(x: Tensor, routing: Routing, rows: int, *, clear: bool) -> Tensor:
    """`[rows, W]` with row r of `x [R, W]` at its slots. `clear` zeroes the rows that no entry owns."""
    width = x.shape[1]
    laid = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0 or width == 0:
        return laid
    source, target = _movable(x), _movable(laid)
    block = min(power_of_2(width), _ROW_BYTES // x.element_size())
    if x.shape[0]:
        scatter_rows_kernel[(x.shape[0], -(-width // block))](
            source, routing.slots, target, source.stride(0), width, CHOICES=routing.slots.shape[1], BLOCK=block
        )
    if clear:
        buckets = routing.counts.shape[0]
        lanes = 2 if INTERPRET else max(1, -(-8 * processors(x.device) // (buckets + 1)))
        clear_padding_kernel[(buckets + 1, lanes)](
            target, routing.starts, routing.counts, buckets, rows, width, BLOCK=block
        )
    return laid


def gather_sum(y: Tensor, slots: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
    """`out[r] = sum over choices of weights[r, j] * y[slots[r, j]]` in fp32; y `[., W]` dense, slots `[R, k]` dense."""
    rows, width = out.shape
    if rows == 0 or width == 0:
        return out
    if y.shape[0] == 0:
        return out.zero_()
    block = min(power_of_2(width), 1024)
    gates = slots if weights is None else weights
    gather_sum_kernel[(rows, -(-width // block))](
        y,
        slots,
        gates,
        out,
        *gates.stride(),
        out.stride(0),
        width,
        CHOICES=slots.shape[1],
        WEIGHTED=weights is not None,
        BLOCK=block,
    )
    return out


def _movable(rows: Tensor) -> Tensor:
    """The same rows as integers: a copy must not touch the bits of a float (fp8 has no native loads everywhere)."""
    return rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
