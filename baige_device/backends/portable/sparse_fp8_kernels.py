# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Sparse MLA attention straight from 656-byte fp8 rows: 512 e4m3 | 4 fp32 scales | 64 bf16."""

import triton
import triton.language as tl

from baige_device.backends.portable.rounding_kernels import rounded
from baige_device.backends.portable.softmax_kernels import natural_lse, softmax_step
from baige_device.backends.portable.sparse_kernels import list_rows, row_offsets


@triton.jit
def _row_scales(scales, offset, valid, ALIGNED: tl.constexpr):
    """The four scales of each row, fp32 `[ROWS, 4]`; byte by byte when rows do not start on multiples of 4."""
    band = tl.arange(0, 4)
    if ALIGNED:
        return tl.load(scales + (offset // 4 + 128)[:, None] + band[None, :], mask=valid[:, None], other=0.0)
    at = scales + (offset + 512)[:, None] + 4 * band[None, :]
    bits = tl.load(at, mask=valid[:, None], other=0).to(tl.int32)
    bits |= tl.load(at + 1, mask=valid[:, None], other=0).to(tl.int32) << 8
    bits |= tl.load(at + 2, mask=valid[:, None], other=0).to(tl.int32) << 16
    bits |= tl.load(at + 3, mask=valid[:, None], other=0).to(tl.int32) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _row_rope(rope, offset, valid, ALIGNED: tl.constexpr):
    """The 64 bf16 columns of each row, bf16 `[ROWS, 64]`."""
    r = tl.arange(0, 64)
    if ALIGNED:
        return tl.load(rope + (offset // 2 + 264)[:, None] + r[None, :], mask=valid[:, None], other=0.0)
    at = rope + (offset + 528)[:, None] + 2 * r[None, :]
    bits = tl.load(at, mask=valid[:, None], other=0).to(tl.int16)
    bits |= tl.load(at + 1, mask=valid[:, None], other=0).to(tl.int16) << 8
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def sparse_fp8_kernel(
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
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
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
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    q_row = q + t * q_t + h[:, None] * q_h
    q_latent = tl.load(q_row + d[None, :], mask=live[:, None], other=0.0).to(DOT)
    q_rope = tl.load(q_row + 512 + r[None, :], mask=live[:, None], other=0.0).to(DOT)
    acc = tl.zeros((BLOCK_H, 512), tl.float32)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
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
        # Masked rows are read as zeros: 0 * NaN of stale memory would poison the sum.
        scale = _row_scales(scales, offset, valid, ALIGNED)
        codes = tl.load(latent + offset[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        k_rope = _row_rope(rope, offset, valid, ALIGNED).to(DOT)
        scaled = tl.reshape(codes, (ROWS, 4, 128)).to(tl.float32) * scale[:, :, None]
        k = tl.reshape(scaled.to(DOT), (ROWS, 512))
        logits = tl.dot(q_latent, tl.trans(k), input_precision=PRECISION) * scale_log2
        logits += tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION) * scale_log2
        logits = tl.where(valid[None, :], logits, float("-inf"))
        if APART:  # always taken; see `sparse_kernel`
            if tile < stop:
                weights, rescale, highest, total = softmax_step(logits, highest, total)
                share = weights.to(DOT)
            else:
                rescale = total
                share = logits.to(DOT)
        else:
            weights, rescale, highest, total = softmax_step(logits, highest, total)
            share = weights.to(DOT)
        acc = tl.dot(share, k, acc * rescale[:, None], input_precision=PRECISION)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    where = out + split * out_s + t * out_t + h[:, None] * out_h + d[None, :]
    tl.store(where, rounded(acc * inverse[:, None], out.dtype.element_ty), mask=live[:, None])
    tl.store(lse + split * lse_s + t * lse_t + h * lse_h, natural_lse(highest, total), mask=live)
