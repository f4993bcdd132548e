# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Online softmax shared by the attention kernels, and the merge of split results. Logits are in base 2 inside."""

import triton
import triton.language as tl

from baige_device.backends.portable.rounding_kernels import rounded

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(logits, highest, total):
    """One tile of the online softmax: (weights, rescale factor, new maximum, new sum). An all-masked row stays 0."""
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    # A row that has seen nothing but masked keys keeps -inf as its maximum; subtracting it would give NaN.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(logits - shift[:, None])
    rescale = tl.exp2(highest - shift)
    return weights, rescale, new_highest, total * rescale + tl.sum(weights, 1)


@triton.jit
def natural_lse(highest, total):
    """Log-sum-exp in base e of the running maximum (base 2) and sum; -inf for an empty row."""
    return tl.where(total > 0, (highest + tl.log2(tl.where(total > 0, total, 1.0))) * LN2, float("-inf"))


@triton.jit
def merge_splits_kernel(
    part_out,
    part_lse,
    out,
    lse,
    rows,
    heads,
    out_t,
    out_h,
    lse_t,
    lse_h,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
):
    """Merge `[S, T*H, Dv]` fp32 partial outputs by their LSE `[S, T*H]` into `out [T, H, Dv]`; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS_BLOCK)
    d = tl.arange(0, WIDTH_BLOCK)
    parts = tl.load(part_lse + s * rows + row, mask=s < SPLITS, other=float("-inf"))
    highest = tl.max(parts, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(parts - shift), 0)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    acc = tl.zeros((WIDTH_BLOCK,), tl.float32)
    for split in range(SPLITS):
        weight = tl.exp(tl.load(part_lse + split * rows + row) - shift) * inverse
        acc += weight * tl.load(part_out + (split * rows + row) * WIDTH + d, mask=d < WIDTH, other=0.0)
    t = row // heads
    h = row % heads
    tl.store(out + t * out_t + h * out_h + d, rounded(acc, out.dtype.element_ty), mask=d < WIDTH)
    tl.store(lse + t * lse_t + h * lse_h, tl.where(total > 0, shift + tl.log(total), float("-inf")))


@triton.jit
def merge_attention_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    rows,
    heads,
    a_t,
    a_h,
    a_d,
    b_t,
    b_h,
    b_d,
    out_t,
    out_h,
    la_t,
    la_h,
    lb_t,
    lb_h,
    lse_t,
    lse_h,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Two-part merge over `[T, H, Dv]`; ROWS (token, head) pairs a program. A part of weight 0 is not read."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    t = row // heads
    h = row % heads
    d = tl.arange(0, WIDTH_BLOCK)
    a = tl.load(lse_a + t * la_t + h * la_h, mask=live, other=float("-inf"))
    b = tl.load(lse_b + t * lb_t + h * lb_h, mask=live, other=float("-inf"))
    highest = tl.maximum(a, b)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight_a = tl.exp(a - shift)
    weight_b = tl.exp(b - shift)
    total = weight_a + weight_b
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    inside = (d < WIDTH)[None, :]
    offset_a = (t * a_t + h * a_h)[:, None] + (d * a_d)[None, :]
    offset_b = (t * b_t + h * b_h)[:, None] + (d * b_d)[None, :]
    # The mask keeps an output of weight 0 (which may hold NaN) out of the sum.
    value_a = tl.load(out_a + offset_a, mask=inside & (weight_a > 0)[:, None], other=0.0).to(tl.float32)
    value_b = tl.load(out_b + offset_b, mask=inside & (weight_b > 0)[:, None], other=0.0).to(tl.float32)
    merged = value_a * (weight_a * inverse)[:, None] + value_b * (weight_b * inverse)[:, None]
    where = (t * out_t + h * out_h)[:, None] + d[None, :]
    tl.store(out + where, rounded(merged, out.dtype.element_ty), mask=inside & live[:, None])
    result = tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse + t * lse_t + h * lse_h, result, mask=live)
