# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Dense attention over a paged cache for a ragged batch; the grid depends on host-known sizes only."""

import triton
import triton.language as tl

from baige_device.backends.portable.rounding_kernels import rounded
from baige_device.backends.portable.softmax_kernels import natural_lse, softmax_step


@triton.jit
def find_request(q_starts, starts_stride, requests, block, rows_per_query, BLOCK_M: tl.constexpr):
    """The last request whose first row block is <= block.

    Request b is given the blocks from `q_starts[b] * rows // BLOCK_M + b` on: enough for any raggedness, and the sum
    over requests is bounded by numbers that the host knows. Number `requests` stands for the padding behind.
    """
    low = block * 0
    high = low + requests
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(q_starts + middle * starts_stride).to(tl.int64) * rows_per_query // BLOCK_M + middle
        if first <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def attend_paged_kernel(
    q,
    k,
    v,
    block_table,
    q_starts,
    seq_lens,
    out,
    lse,
    q_t,
    q_h,
    k_page,
    k_row,
    k_g,
    v_page,
    v_row,
    v_g,
    bt_b,
    bt_m,
    starts_stride,
    lens_stride,
    out_s,
    out_t,
    out_h,
    lse_s,
    lse_t,
    lse_h,
    tokens,
    requests,
    page_tokens,
    window,
    scale_log2,
    scale_over_cap,
    cap_log2,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SHARED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M (query, head) pairs of one request and kv head, one split of its keys. HEADS = H / G."""
    pid = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    b = find_request(q_starts, starts_stride, requests, pid, HEADS, BLOCK_M)
    first_query = tl.load(q_starts + b * starts_stride).to(tl.int64)
    is_request = b < requests
    last_query = tl.load(q_starts + (b + 1) * starts_stride, mask=is_request, other=0).to(tl.int64)
    last_query = tl.where(is_request, last_query, tokens)
    length = tl.load(seq_lens + b * lens_stride, mask=is_request, other=0).to(tl.int64)
    queries = last_query - first_query
    first_block = first_query * HEADS // BLOCK_M + b
    pair = (pid - first_block) * BLOCK_M + tl.arange(0, BLOCK_M)
    if (pid - first_block) * BLOCK_M < queries * HEADS:
        live = pair < queries * HEADS
        query = pair // HEADS
        t = first_query + query
        head = g * HEADS + pair - query * HEADS
        position = length - queries + query
        d0 = tl.arange(0, D0)
        q_row = q + (t * q_t + head * q_h)[:, None]
        q0 = tl.load(q_row + d0[None, :], mask=live[:, None] & (d0 < D)[None, :], other=0.0).to(DOT)
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            q1 = tl.load(q_row + d1[None, :], mask=live[:, None], other=0.0).to(DOT)
        acc = tl.zeros((BLOCK_M, WIDTH_BLOCK), tl.float32)
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        # Only keys that some row of this block sees are read: pages outside the window may have been freed.
        first_position = length - queries + (pid - first_block) * BLOCK_M // HEADS
        last_position = tl.minimum(length - queries + ((pid - first_block + 1) * BLOCK_M - 1) // HEADS, length - 1)
        low = tl.zeros((), tl.int64)
        high = length
        if WINDOW:
            low = tl.maximum(tl.maximum(first_position, 0) - window + 1, 0)
        if CAUSAL:
            high = tl.minimum(length, last_position + 1)
        first_tile = low // BLOCK_N
        tiles = tl.maximum(tl.cdiv(high, BLOCK_N) - first_tile, 0)
        per_split = tl.cdiv(tiles, splits)
        start = first_tile + split * per_split
        stop = tl.minimum(start + per_split, first_tile + tiles)
        dv = tl.arange(0, WIDTH_BLOCK)
        table = block_table + tl.minimum(b, requests - 1) * bt_b
        for tile in range(start, stop):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            readable = (n >= low) & (n < high)
            page_index = n // page_tokens
            page = tl.load(table + page_index * bt_m, mask=readable, other=0).to(tl.int64)
            row = n - page_index * page_tokens
            k_row_at = k + (page * k_page + row * k_row + g * k_g)[:, None]
            if D0 > D:
                k0 = tl.load(k_row_at + d0[None, :], mask=readable[:, None] & (d0 < D)[None, :], other=0.0).to(DOT)
            else:
                k0 = tl.load(k_row_at + d0[None, :], mask=readable[:, None], other=0.0).to(DOT)
            logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
            if D1 > 0:
                k1 = tl.load(k_row_at + d1[None, :], mask=readable[:, None], other=0.0).to(DOT)
                logits = tl.dot(q1, tl.trans(k1), logits, input_precision=PRECISION)
            if SOFT_CAP:
                # tanh(x) = 1 - 2 / (e^2x + 1) saturates rightly at both ends.
                logits = cap_log2 * (1.0 - 2.0 / (tl.exp(2.0 * scale_over_cap * logits) + 1.0))
            else:
                logits = logits * scale_log2
            visible = readable[None, :] & (position >= 0)[:, None]
            if CAUSAL:
                visible = visible & (n[None, :] <= position[:, None])
            if WINDOW:
                visible = visible & (n[None, :] > position[:, None] - window)
            logits = tl.where(visible, logits, float("-inf"))
            weights, rescale, highest, total = softmax_step(logits, highest, total)
            acc = acc * rescale[:, None]
            if SHARED:
                acc = tl.dot(weights.to(DOT), k0, acc, input_precision=PRECISION)
            else:
                v_row_at = v + (page * v_page + row * v_row + g * v_g)[:, None]
                inside = readable[:, None] & (dv < WIDTH)[None, :]
                values = tl.load(v_row_at + dv[None, :], mask=inside, other=0.0).to(DOT)
                acc = tl.dot(weights.to(DOT), values, acc, input_precision=PRECISION)
        result = acc * tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)[:, None]
        where = out + split * out_s + (t * out_t + head * out_h)[:, None] + dv[None, :]
        tl.store(where, rounded(result, out.dtype.element_ty), mask=live[:, None] & (dv < WIDTH)[None, :])
        tl.store(lse + split * lse_s + t * lse_t + head * lse_h, natural_lse(highest, total), mask=live)
