# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""What FlashAttention leaves undone for the contract: rows of no request, and the order of the log-sum-exps."""

import triton
import triton.language as tl


@triton.jit
def finish_kernel(
    raw_lse,
    out,
    lse,
    q_starts,
    starts_stride,
    requests,
    tokens,
    heads,
    raw_h,
    raw_t,
    out_t,
    out_h,
    lse_t,
    lse_h,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program: ROWS tokens, HEADS heads of lse `[T, H]` from raw `[H, T]`; rows behind the last get 0 and -inf."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_head = tl.program_id(1) * HEADS
    h = first_head + tl.arange(0, HEADS)
    end = tl.load(q_starts + requests * starts_stride).to(tl.int64)
    inside = (t < tokens)[:, None] & (h < heads)[None, :]
    live = (t < end)[:, None]
    where = h.to(tl.int64)[None, :] * raw_h + t[:, None] * raw_t
    total = tl.load(raw_lse + where, mask=inside & live, other=float("-inf"))
    # A build may mark an empty row by +inf or NaN.
    total = tl.where(total < float("inf"), total, float("-inf"))
    tl.store(lse + t[:, None] * lse_t + h[None, :] * lse_h, total, mask=inside)
    if (tl.program_id(0) + 1) * ROWS > end:
        d = tl.arange(0, WIDTH_BLOCK)
        padding = ((t < tokens) & (t >= end))[:, None] & (d < WIDTH)[None, :]
        zeros = tl.zeros((ROWS, WIDTH_BLOCK), out.dtype.element_ty)
        for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
            tl.store(out + t[:, None] * out_t + head * out_h + d[None, :], zeros, mask=padding)
