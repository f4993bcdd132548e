# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Sparse attention over rows of one dtype. On Hopper 64 heads x 64 rows, 8 warps and 2 stages compile to wgmma."""

import triton
import triton.language as tl

from baige_device.backends.portable.rounding_kernels import rounded
from baige_device.backends.portable.softmax_kernels import natural_lse, softmax_step


@triton.jit
def row_offsets(rows, page_tokens, page_stride, row_stride, PAGED: tl.constexpr):
    """Element offset of each row id in a `[S, ...]` or paged `[P, N, ...]` pool, in the type of `rows`."""
    if PAGED:
        page = rows // page_tokens
        return page * page_stride + (rows - page * page_tokens) * row_stride
    return rows * row_stride


@triton.jit
def list_rows(
    indices,
    tile,
    first_tiles,
    first_list,
    first_stride,
    count,
    second_list,
    second_stride,
    second_count,
    ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Row ids of one tile of the first list, or of the second one whose tiles follow; -1 behind the end."""
    if EXTRA:
        second = tile >= first_tiles
        n = (tile - tl.where(second, first_tiles, 0)) * ROWS + tl.arange(0, ROWS)
        at = tl.where(second, second_list, first_list) + n * tl.where(second, second_stride, first_stride)
        return tl.load(indices + at, mask=n < tl.where(second, second_count, count), other=-1).to(OFFSET)
    n = tile * ROWS + tl.arange(0, ROWS)
    return tl.load(indices + first_list + n * first_stride, mask=n < count, other=-1).to(OFFSET)


@triton.jit
def sparse_kernel(
    q,
    k,
    v,
    indices,
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
    i_t,
    i_g,
    i_n,
    count,
    page_tokens,
    extra_k,
    xk_page,
    xk_row,
    xk_g,
    extra_v,
    xv_page,
    xv_row,
    xv_g,
    extra_list,
    xi_t,
    xi_g,
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
    groups,
    head_blocks,
    tiles_per_split,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    PAGED: tl.constexpr,
    EXTRA: tl.constexpr,
    SHARED: tl.constexpr,
    APART: tl.constexpr,
    OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_H heads of one (query, kv head), one split of its tiles. HEADS = H / G.

    The head blocks of a query are neighbours in launch order, so that the second one finds the rows in the L2 cache.
    The second set's tiles follow the first's in the same loop (two loops would double the live registers); its tensors
    are given as element distances from those of the first: `extra_k`, `extra_v`, `extra_list`.
    """
    pid = tl.program_id(0)
    split = tl.program_id(1)
    g = ((pid // head_blocks) % groups).to(tl.int64)
    t = (pid // (head_blocks * groups)).to(tl.int64)
    h = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < HEADS
    head = g * HEADS + h
    d0 = tl.arange(0, D0)
    dv = tl.arange(0, WIDTH_BLOCK)
    q_row = q + t * q_t + head[:, None] * q_h
    q0 = tl.load(q_row + d0[None, :], mask=live[:, None] & (d0 < D)[None, :], other=0.0).to(DOT)
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q_row + d1[None, :], mask=live[:, None], other=0.0).to(DOT)
    acc = tl.zeros((BLOCK_H, WIDTH_BLOCK), tl.float32)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    first_tiles = tl.cdiv(count, ROWS)
    start = split * tiles_per_split
    stop = tl.minimum(start + tiles_per_split, first_tiles + tl.cdiv(extra_count, ROWS))
    first_list = t * i_t + g * i_g
    second_list = extra_list + t * xi_t + g * xi_g
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
            k_at = tl.where(second, extra_k + g * xk_g, g * k_g) + row_offsets(
                rows,
                tl.where(second, extra_page_tokens, page_tokens),
                tl.where(second, xk_page, k_page),
                tl.where(second, xk_row, k_row),
                PAGED,
            )
        else:
            k_at = (g * k_g).to(OFFSET) + row_offsets(rows, page_tokens, k_page, k_row, PAGED)
        # Masked rows are read as zeros: 0 * NaN of stale memory would poison the sum.
        if D0 > D:
            k0 = tl.load(k + k_at[:, None] + d0[None, :], mask=valid[:, None] & (d0 < D)[None, :], other=0.0).to(DOT)
        else:
            k0 = tl.load(k + k_at[:, None] + d0[None, :], mask=valid[:, None], other=0.0).to(DOT)
        # No product takes another as its start: that would count as a chain, too.
        logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION) * scale_log2
        if D1 > 0:
            k1 = tl.load(k + k_at[:, None] + d1[None, :], mask=valid[:, None], other=0.0).to(DOT)
            logits += tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale_log2
        logits = tl.where(valid[None, :], logits, float("-inf"))
        if APART:
            # Always taken. Triton gives all warps to the rows of a product that feeds another; with 64 rows and 8 warps
            # both warp groups would then compute the same logits. It does not look through a branch.
            if tile < stop:
                weights, rescale, highest, total = softmax_step(logits, highest, total)
                share = weights.to(DOT)
            else:
                rescale = total
                share = logits.to(DOT)
        else:
            weights, rescale, highest, total = softmax_step(logits, highest, total)
            share = weights.to(DOT)
        acc = acc * rescale[:, None]
        if SHARED:
            acc = tl.dot(share, k0, acc, input_precision=PRECISION)
        else:
            if EXTRA:
                v_at = tl.where(second, extra_v + g * xv_g, g * v_g) + row_offsets(
                    rows,
                    tl.where(second, extra_page_tokens, page_tokens),
                    tl.where(second, xv_page, v_page),
                    tl.where(second, xv_row, v_row),
                    PAGED,
                )
            else:
                v_at = (g * v_g).to(OFFSET) + row_offsets(rows, page_tokens, v_page, v_row, PAGED)
            inside = valid[:, None] & (dv < WIDTH)[None, :]
            values = tl.load(v + v_at[:, None] + dv[None, :], mask=inside, other=0.0).to(DOT)
            acc = tl.dot(share, values, acc, input_precision=PRECISION)
    result = acc * tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)[:, None]
    where = out + split * out_s + t * out_t + head[:, None] * out_h + dv[None, :]
    tl.store(where, rounded(result, out.dtype.element_ty), mask=live[:, None] & (dv < WIDTH)[None, :])
    tl.store(lse + split * lse_s + t * lse_t + head * lse_h, natural_lse(highest, total), mask=live)
