# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Payload times scale, one tile a program."""

import triton
import triton.language as tl

from baige_device.backends.portable.early_start import after_previous_kernel
from baige_device.backends.portable.float_codec import decode_e4m3, encode_bf16


@triton.jit
def dequantize_kernel(
    payload,
    scales,
    out,
    rows,
    columns,
    payload_stride,
    out_stride,
    scale_stride,
    scale_step,
    height,
    width,
    SOFTWARE: tl.constexpr,
    ENCODED: tl.constexpr,
    ONE_ROW_OF_SCALES: tl.constexpr,
    ONE_SCALE_DOWN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_previous_kernel(EARLY)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    wide = row.to(tl.int64)[:, None]
    coded = tl.load(payload + wide * payload_stride + column[None, :], mask=inside, eviction_policy="evict_first")
    value = decode_e4m3(coded) if SOFTWARE else coded.to(tl.float32)
    # A tile inside one block needs one scale, a tile inside one column of blocks one scale a row.
    if ONE_ROW_OF_SCALES and ONE_SCALE_DOWN:
        down = (tl.program_id(0) * TILE_ROWS // height).to(tl.int64)
        scale = tl.load(scales + down * scale_stride + tl.program_id(1) * TILE_COLUMNS // width * scale_step)
    elif ONE_ROW_OF_SCALES:
        down = (row // height).to(tl.int64) * scale_stride
        across = tl.program_id(1) * TILE_COLUMNS // width * scale_step
        scale = tl.load(scales + down + across, mask=row < rows, other=0.0)[:, None]
    else:
        down = (row // height).to(tl.int64)[:, None] * scale_stride
        scale = tl.load(scales + down + (column // width)[None, :] * scale_step, mask=inside, other=0.0)
    value = value * scale
    target = out + wide * out_stride + column[None, :]
    if ENCODED:
        tl.store(target, encode_bf16(value), mask=inside)
    else:
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)
