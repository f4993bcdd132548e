# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Sparse MLA attention of at most 32 heads from 656-byte fp8 rows: 512 e4m3 | 4 fp32 scales | 64 bf16.

Decoding must stay cheap, and rows must be on their way while others are multiplied: two programs share a
multiprocessor.

* Keys are decoded to fp16 as fractions of their row's largest scale: a conversion and a multiplication of two columns
  at a time. The row's scale goes to the logits in fp32, and by its logarithm to the weights: they are p * scale as a
  fraction of the largest, which fp16 holds whatever the scales are. The sum of weights takes it out again.
* Few heads are bound by reading shared memory, so each decoded row is read once for each product: logits come from a
  warp-group product of 64 rows with q as its right side, values from warps that share out the columns.
"""

import triton
import triton.language as tl

from baige_device.backends.portable.float_codec import decode_e4m3
from baige_device.backends.portable.rounding_kernels import rounded
from baige_device.backends.portable.softmax_kernels import natural_lse
from baige_device.backends.portable.sparse_kernels import list_rows, row_offsets

LEAST_SCALE = tl.constexpr(1e-20)


@triton.jit
def _band(latent, offset, valid, scale, inverse, BAND: tl.constexpr, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """128 columns of each row as fractions of its largest scale, HALF `[ROWS, 128]`."""
    d = BAND * 128 + tl.arange(0, 128)
    # Masked rows are read as zeros: 0 * NaN of stale memory would poison the sum.
    codes = tl.load(latent + offset[:, None] + d[None, :], mask=valid[:, None], other=0)
    ratio, _ = tl.broadcast((scale * inverse).to(HALF)[:, None], codes)
    if NATIVE:
        # Called impure, which it is not: else the compiler decodes once for each product, in the layout of each, and
        # then cannot prefetch the codes.
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi;
            .reg .b32 a, b;
            mov.b32 {lo, hi}, $2;
            cvt.rn.f16x2.e4m3x2 a, lo;
            cvt.rn.f16x2.e4m3x2 b, hi;
            mul.rn.f16x2 $0, a, $3;
            mul.rn.f16x2 $1, b, $4;
            }""",
            "=r,=r,r,r,r",
            [codes, ratio],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return decode_e4m3(codes).to(HALF) * ratio


@triton.jit
def sparse_fp8_few_kernel(
    q,
    latent,
    scales,
    rope,
    indices,
    out,
    lse,
    q_t,
    q_h,
    page_bytes,
    row_bytes,
    i_t,
    i_n,
    count,
    page_tokens,
    extra_pool,
    extra_page_bytes,
    extra_row_bytes,
    extra_list,
    xi_t,
    xi_n,
    extra_count,
    extra_page_tokens,
    out_s,
    out_t,
    out_h,
    lse_s,
    lse_t,
    lse_h,
    scale_log2,
    heads,
    head_blocks,
    tiles_per_split,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    PAGED: tl.constexpr,
    EXTRA: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_H heads of one query, one split of its tiles; the second set as in `sparse_kernel`."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    h = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = (pid // head_blocks).to(tl.int64)
    live = h < heads
    d = tl.arange(0, 128)
    r = tl.arange(0, 64)
    q_row = q + t * q_t + h[:, None] * q_h
    q0 = tl.load(q_row + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    q1 = tl.load(q_row + 128 + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    q2 = tl.load(q_row + 256 + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    q3 = tl.load(q_row + 384 + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    q_rope = tl.load(q_row + 512 + r[None, :], mask=live[:, None], other=0.0).to(DOT)
    most = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    q_most = tl.maximum(tl.max(most, 1), 1e-30)
    q0 = (q0 / q_most[:, None]).to(HALF)
    q1 = (q1 / q_most[:, None]).to(HALF)
    q2 = (q2 / q_most[:, None]).to(HALF)
    q3 = (q3 / q_most[:, None]).to(HALF)
    acc0 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc1 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc2 = tl.zeros((BLOCK_H, 128), tl.float32)
    acc3 = tl.zeros((BLOCK_H, 128), tl.float32)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, BLOCK_H), tl.float32)  # summed over rows behind the loop: no exchange between warps in it
    first_tiles = tl.cdiv(count, ROWS)
    start = split * tiles_per_split
    stop = tl.minimum(start + tiles_per_split, first_tiles + tl.cdiv(extra_count, ROWS))
    first_list = t * i_t
    second_list = extra_list + t * xi_t
    # Each tile's ids are loaded one tile ahead: the rows can then be fetched while the tile before is multiplied.
    ahead = list_rows(
        indices, start, first_tiles, first_list, i_n, count, second_list, xi_n, extra_count, ROWS, EXTRA, OFFSET
    )
    for tile in range(start, stop):
        valid = ahead >= 0
        rows = tl.maximum(ahead, 0)
        ahead = list_rows(
            indices, tile + 1, first_tiles, first_list, i_n, count, second_list, xi_n, extra_count, ROWS, EXTRA, OFFSET
        )
        if EXTRA:
            second = tile >= first_tiles
            offset = tl.where(second, extra_pool, 0) + row_offsets(
                rows,
                tl.where(second, extra_page_tokens, page_tokens),
                tl.where(second, extra_page_bytes, page_bytes),
                tl.where(second, extra_row_bytes, row_bytes),
                PAGED,
            )
        else:
            offset = row_offsets(rows, page_tokens, page_bytes, row_bytes, PAGED)
        at = scales + offset // 4 + 128
        s0 = tl.load(at, mask=valid, other=0.0)
        s1 = tl.load(at + 1, mask=valid, other=0.0)
        s2 = tl.load(at + 2, mask=valid, other=0.0)
        s3 = tl.load(at + 3, mask=valid, other=0.0)
        k_rope = tl.load(rope + (offset // 2 + 264)[:, None] + r[None, :], mask=valid[:, None], other=0.0).to(DOT)
        largest = tl.maximum(tl.maximum(tl.abs(s0), tl.abs(s1)), tl.maximum(tl.abs(s2), tl.abs(s3)))
        largest = tl.maximum(largest, LEAST_SCALE)
        inverse = 1.0 / largest
        k0 = _band(latent, offset, valid, s0, inverse, 0, HALF, NATIVE)
        k1 = _band(latent, offset, valid, s1, inverse, 1, HALF, NATIVE)
        k2 = _band(latent, offset, valid, s2, inverse, 2, HALF, NATIVE)
        k3 = _band(latent, offset, valid, s3, inverse, 3, HALF, NATIVE)
        part = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
        part = tl.dot(k1, tl.trans(q1), part, input_precision=PRECISION)
        part = tl.dot(k2, tl.trans(q2), part, input_precision=PRECISION)
        part = tl.dot(k3, tl.trans(q3), part, input_precision=PRECISION)
        logits = part * (largest[:, None] * (q_most * scale_log2)[None, :])
        logits += tl.dot(k_rope, tl.trans(q_rope), input_precision=PRECISION) * scale_log2
        # From here on the weights are those of the decoded fractions: p * largest.
        logits = tl.where(valid[:, None], logits + tl.log2(largest)[:, None], float("-inf"))
        # Always taken: seen to depend on one another, both products would get the first one's division among warps, and
        # each warp would read all columns. Triton does not look through a branch.
        if tile < stop:
            new_highest = tl.maximum(highest, tl.max(logits, 0))
            # A head that has seen nothing but masked keys keeps -inf as its maximum; subtracting it would give NaN.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(logits - shift[None, :])
            rescale = tl.exp2(highest - shift)
            totals = totals * rescale[None, :] + weights * inverse[:, None]
            highest = new_highest
            share = tl.trans(weights.to(HALF))
        else:
            rescale = highest
            share = tl.trans(logits.to(HALF))
        acc0 = tl.dot(share, k0, acc0 * rescale[:, None], input_precision=PRECISION)
        acc1 = tl.dot(share, k1, acc1 * rescale[:, None], input_precision=PRECISION)
        acc2 = tl.dot(share, k2, acc2 * rescale[:, None], input_precision=PRECISION)
        acc3 = tl.dot(share, k3, acc3 * rescale[:, None], input_precision=PRECISION)
    total = tl.sum(totals, 0)
    norm = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)[:, None]
    where = out + split * out_s + t * out_t + h[:, None] * out_h + d[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(where, rounded(acc0 * norm, kind), mask=live[:, None])
    tl.store(where + 128, rounded(acc1 * norm, kind), mask=live[:, None])
    tl.store(where + 256, rounded(acc2 * norm, kind), mask=live[:, None])
    tl.store(where + 384, rounded(acc3 * norm, kind), mask=live[:, None])
    tl.store(lse + split * lse_s + t * lse_t + h * lse_h, natural_lse(highest, total), mask=live)
