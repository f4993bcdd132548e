# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Grouped matrix products of the experts' gated feed-forward; rows of one expert lie together."""

import triton
import triton.language as tl

from baige_device.backends.portable.rounding_kernels import rounded


@triton.jit
def _find_tile(
    tile,
    starts,
    counts,
    experts,
    rows_per_expert,
    total_rows,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(expert, first row, valid rows from there, rows to write from there) of one tile; expert = `experts` behind."""
    e = tl.arange(0, EXPERTS)
    inside = e < experts
    count = tl.load(counts + e, mask=inside, other=0)
    if MASKED:
        start = e * rows_per_expert
        owned = count
    else:
        start = tl.load(starts + e, mask=inside, other=0)
        stop = tl.load(starts + e + 1, mask=e < experts - 1, other=0)
        stop = tl.where(e == experts - 1, total_rows, stop)
        owned = tl.where(inside, stop - start, 0)
    tiles = tl.cdiv(owned, BLOCK_M)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where(inside & (after <= tile), 1, 0), 0)
    mine = e == expert
    offset = (tile - tl.sum(tl.where(mine, after - tiles, 0), 0)) * BLOCK_M
    first = tl.sum(tl.where(mine, start, 0), 0).to(tl.int64) + offset
    return expert, first, tl.sum(tl.where(mine, count, 0), 0) - offset, tl.sum(tl.where(mine, owned, 0), 0) - offset


@triton.jit
def up_kernel(
    x,
    w13,
    starts,
    counts,
    hidden,
    experts,
    rows_per_expert,
    total_rows,
    row_tiles,
    width,
    inner,
    w_e,
    w_n,
    w_k,
    EXPERTS: tl.constexpr,
    MASKED: tl.constexpr,
    GELU: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`hidden = act(x w1^T) * (x w3^T)`: x `[R, H]`, w13 `[E, 2I, H]`, hidden `[R, I]`; width = H, inner = I."""
    pid = tl.program_id(0)
    # Row tiles of one expert are neighbours, so that they share its weights in the L2 cache.
    expert, first, valid, _ = _find_tile(
        pid % row_tiles, starts, counts, experts, rows_per_expert, total_rows, EXPERTS, BLOCK_M, MASKED
    )
    if (expert < experts) & (valid > 0):
        m = tl.arange(0, BLOCK_M)
        n = (pid // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_at = x + (first + m)[:, None] * width
        w_at = w13 + expert.to(tl.int64) * w_e + n[None, :].to(tl.int64) * w_n
        up_at = w13 + expert.to(tl.int64) * w_e + (n + inner)[None, :].to(tl.int64) * w_n
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width, BLOCK_K):
            kk = start + k
            a = tl.load(x_at + kk[None, :], mask=(m < valid)[:, None] & (kk < width)[None, :], other=0.0).to(DOT)
            inside = (kk < width)[:, None] & (n < inner)[None, :]
            b = tl.load(w_at + kk[:, None] * w_k, mask=inside, other=0.0).to(DOT)
            gate = tl.dot(a, b, gate, input_precision="ieee")
            b = tl.load(up_at + kk[:, None] * w_k, mask=inside, other=0.0).to(DOT)
            up = tl.dot(a, b, up, input_precision="ieee")
        # x * sigmoid(2u) is 0.5 x (1 + tanh u).
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
        active = gate / (1.0 + tl.exp(-slope)) * up
        where = hidden + (first + m)[:, None] * inner + n[None, :]
        tl.store(where, rounded(active, hidden.dtype.element_ty), mask=(m < valid)[:, None] & (n < inner)[None, :])


@triton.jit
def down_kernel(
    hidden,
    w2,
    starts,
    counts,
    y,
    experts,
    rows_per_expert,
    total_rows,
    row_tiles,
    width,
    inner,
    w_e,
    w_n,
    w_k,
    EXPERTS: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`y = hidden w2^T`: hidden `[R, I]`, w2 `[E, H, I]`, y `[R, H]`, zeros in the rows that only pad."""
    pid = tl.program_id(0)
    expert, first, valid, owned = _find_tile(
        pid % row_tiles, starts, counts, experts, rows_per_expert, total_rows, EXPERTS, BLOCK_M, MASKED
    )
    if expert < experts:
        m = tl.arange(0, BLOCK_M)
        n = (pid // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        h_at = hidden + (first + m)[:, None] * inner
        w_at = w2 + expert.to(tl.int64) * w_e + n[None, :].to(tl.int64) * w_n
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, inner, BLOCK_K):
            kk = start + k
            a = tl.load(h_at + kk[None, :], mask=(m < valid)[:, None] & (kk < inner)[None, :], other=0.0).to(DOT)
            b = tl.load(w_at + kk[:, None] * w_k, mask=(kk < inner)[:, None] & (n < width)[None, :], other=0.0).to(DOT)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        # An inf in the weights would turn the zero rows into NaN.
        acc = tl.where((m < valid)[:, None], acc, 0.0)
        where = y + (first + m)[:, None] * width + n[None, :]
        tl.store(where, rounded(acc, y.dtype.element_ty), mask=(m < owned)[:, None] & (n < width)[None, :])
