# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Stable counting sort of (row, choice) entries into buckets, and the row movers of MoE dispatch and combine.

An entry is one of the k choices of a row; its bucket is a local expert, or a rank. Equal choices of one row are one
entry: they get the same slot.
"""

import triton
import triton.language as tl

from baige_device.backends.portable.rounding_kernels import rounded


@triton.jit
def _bucket(ids, entry, live, id_r, id_k, first_id, buckets, CHOICES: tl.constexpr):
    row = (entry // CHOICES).to(tl.int64)
    bucket = tl.load(ids + row * id_r + (entry % CHOICES) * id_k, mask=live, other=-1).to(tl.int32) - first_id
    return tl.where((bucket >= 0) & (bucket < buckets) & live, bucket, -1)


@triton.jit
def rank_entries_kernel(
    ids,
    ranks,
    histogram,
    entries,
    id_r,
    id_k,
    first_id,
    buckets,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per chunk of BLOCK entries: each one's rank within its bucket, and the chunk's histogram `[chunks, buckets]`."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    entry = chunk * BLOCK + lane
    live = entry < entries
    bucket = _bucket(ids, entry, live, id_r, id_k, first_id, buckets, CHOICES)
    choice = entry % CHOICES
    repeated = tl.zeros((BLOCK,), tl.int32)
    for other in range(CHOICES):
        same_row = _bucket(ids, entry - choice + other, live, id_r, id_k, first_id, buckets, CHOICES)
        repeated = tl.where((other < choice) & (same_row == bucket), 1, repeated)
    counted = tl.where((bucket >= 0) & (repeated == 0), bucket, -2)
    # The same values once more, as columns: entry j of the chunk against entry i.
    column = tl.reshape(counted, (1, BLOCK))
    same = (tl.reshape(bucket, (BLOCK, 1)) == column).to(tl.int32)
    before = tl.sum(tl.where(lane[None, :] < lane[:, None], same, 0), 1)
    tl.store(ranks + entry, before - repeated, mask=live)
    # All entries of a bucket store the same total.
    tl.store(histogram + chunk * buckets + bucket, tl.sum(same, 1), mask=bucket >= 0)


@triton.jit
def scan_chunks_kernel(histogram, counts, chunks, buckets, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr):
    """Exclusive prefix sums down the chunks, in place, and the totals."""
    bucket = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = bucket < buckets
    running = tl.zeros((BLOCK_B,), tl.int32)
    for first in range(0, chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        where = histogram + chunk[:, None] * buckets + bucket[None, :]
        mask = (chunk < chunks)[:, None] & inside[None, :]
        values = tl.load(where, mask=mask, other=0)
        tl.store(where, tl.cumsum(values, 0) - values + running[None, :], mask=mask)
        running += tl.sum(values, 0)
    tl.store(counts + bucket, running, mask=inside)


@triton.jit
def bucket_starts_kernel(counts, starts, buckets, alignment, capacity, BLOCK: tl.constexpr, FIXED: tl.constexpr):
    """First row of each bucket `[buckets + 1]`: aligned running sums, or multiples of `capacity`."""
    bucket = tl.arange(0, BLOCK)
    count = tl.load(counts + bucket, mask=bucket < buckets, other=0)
    if FIXED:
        tl.store(starts + bucket, bucket * capacity, mask=bucket <= buckets)
    else:
        padded = (count + alignment - 1) // alignment * alignment
        tl.store(starts + bucket, tl.cumsum(padded, 0) - padded, mask=bucket <= buckets)


@triton.jit
def entry_slots_kernel(
    ids,
    ranks,
    histogram,
    starts,
    slots,
    entries,
    id_r,
    id_k,
    first_id,
    buckets,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row of each entry in the bucketed layout, -1 for entries without a bucket."""
    chunk = tl.program_id(0)
    entry = chunk * BLOCK + tl.arange(0, BLOCK)
    live = entry < entries
    bucket = _bucket(ids, entry, live, id_r, id_k, first_id, buckets, CHOICES)
    valid = bucket >= 0
    slot = tl.load(starts + bucket, mask=valid, other=0) + tl.load(ranks + entry, mask=valid, other=0)
    slot += tl.load(histogram + chunk * buckets + bucket, mask=valid, other=0)
    tl.store(slots + entry, tl.where(valid, slot, -1), mask=live)


@triton.jit
def scatter_rows_kernel(x, slots, laid, x_r, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy row r of `x [R, W]` to its slots in `laid [., W]`: read once, written once a choice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_r + column, mask=inside)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots + row * CHOICES + choice).to(tl.int64)
        tl.store(laid + slot * width + column, value, mask=column < tl.where(slot >= 0, width, 0))


@triton.jit
def clear_padding_kernel(laid, starts, counts, buckets, rows, width, BLOCK: tl.constexpr):
    """Zero the rows of `laid [rows, W]` behind each bucket's entries; bucket number `buckets` is the tail."""
    bucket = tl.program_id(0)
    first = tl.load(starts + bucket) + tl.load(counts + bucket, mask=bucket < buckets, other=0)
    stop = tl.load(starts + bucket + 1, mask=bucket < buckets, other=0)
    stop = tl.where(bucket < buckets, stop, rows)
    for row in range(first + tl.program_id(1), stop, tl.num_programs(1)):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = (tl.zeros((BLOCK,), tl.int64) + row) * width + column
            tl.store(laid + at, tl.zeros((BLOCK,), laid.dtype.element_ty), mask=column < width)


@triton.jit
def gather_sum_kernel(
    y,
    slots,
    weights,
    out,
    w_r,
    w_k,
    out_r,
    width,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out[r] = sum over choices of weight * y[slot]` in fp32; masked loads, so that all choices are in flight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots + row * CHOICES + choice).to(tl.int64)
        present = column < tl.where(slot >= 0, width, 0)
        value = tl.load(y + slot * width + column, mask=present, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A choice that takes no part may have any weight, NaN too.
            value *= tl.load(weights + row * w_r + choice * w_k, mask=slot >= 0, other=0.0)
        acc += value
    tl.store(out + row * out_r + column, rounded(acc, out.dtype.element_ty), mask=inside)
