# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Scatter of token rows into a paged cache, with conversion when the element types differ."""

import triton
import triton.language as tl

E4M3_LARGEST = tl.constexpr(448.0)


@triton.jit
def kv_write_kernel(
    values,
    cache,
    slots,
    slot_stride,
    page_tokens,
    v_t,
    v_g,
    c_page,
    c_row,
    c_g,
    groups,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CONVERT: tl.constexpr,
    TO_E4M3: tl.constexpr,
):
    """One program: BLOCK_G heads of one token."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t * slot_stride).to(tl.int64)
    if slot >= 0:
        page = slot // page_tokens
        row = slot - page * page_tokens
        g = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        inside = (g < groups)[:, None] & (d < D)[None, :]
        value = tl.load(values + t * v_t + (g * v_g)[:, None] + d[None, :], mask=inside)
        if CONVERT:
            value = value.to(tl.float32)
            if TO_E4M3:
                # Not every chip's conversion saturates. Comparisons are false for NaN, which stays.
                value = tl.where(value > E4M3_LARGEST, E4M3_LARGEST, value)
                value = tl.where(value < -E4M3_LARGEST, -E4M3_LARGEST, value)
            value = value.to(cache.dtype.element_ty)
        tl.store(cache + page * c_page + row * c_row + (g * c_g)[:, None] + d[None, :], value, mask=inside)
