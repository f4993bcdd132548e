# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Block quantisation: largest magnitude, scale and payload of one block a program, or of several whole rows."""

import triton
import triton.language as tl

from baige_device.backends.portable.early_start import after_previous_kernel
from baige_device.backends.portable.float_codec import encode_bf16, encode_e4m3


@triton.jit
def _load(weight, row, column, rows_end, columns_end, row_stride, column_stride, POLICY: tl.constexpr):
    inside = (row < rows_end)[:, None] & (column < columns_end)[None, :]
    offset = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(weight + offset, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _store(
    payload,
    values,
    scale,
    row,
    column,
    rows_end,
    columns_end,
    columns,
    LARGEST: tl.constexpr,
    WIRE: tl.constexpr,
    BF16_MAX: tl.constexpr,
    NATIVE: tl.constexpr,
):
    inside = (row < rows_end)[:, None] & (column < columns_end)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    if WIRE == "bf16":
        coded = tl.minimum(tl.maximum(values, -BF16_MAX), BF16_MAX)
    else:
        # One division a block: the product is within one rounding of the quotient.
        coded = tl.minimum(tl.maximum(values * tl.div_rn(scale * 0 + 1.0, scale), -LARGEST), LARGEST)
    if WIRE == "int8_absmax":
        # Adding and taking off 1.5 * 2**23 rounds to the nearest even integer.
        coded = (coded + 12582912.0) - 12582912.0
    if WIRE == "fp8_e4m3" and not NATIVE:
        tl.store(payload + offset, encode_e4m3(coded), mask=inside)
    elif WIRE == "bf16" and not NATIVE:
        tl.store(payload + offset, encode_bf16(coded), mask=inside)
    else:
        tl.store(payload + offset, coded.to(payload.dtype.element_ty), mask=inside)


@triton.jit
def _largest_a_row(values):
    """Largest magnitude of each row; NaN and inf become inf, so that they survive every later comparison."""
    magnitude = tl.abs(values)
    return tl.max(tl.where(magnitude <= 3.4028234663852886e38, magnitude, float("inf")), 1)


@triton.jit
def _largest(values, known):
    """Largest magnitude so far."""
    return tl.maximum(known, tl.max(_largest_a_row(values), 0))


@triton.jit
def _scale(amax, LARGEST: tl.constexpr, WIRE: tl.constexpr, TINY: tl.constexpr):
    if WIRE == "bf16":
        return amax * 0 + 1.0
    scale = tl.div_rn(amax, amax * 0 + LARGEST)
    return tl.where(scale < TINY, 1.0, scale)


@triton.jit
def quantize_kernel(
    weight,
    payload,
    amax_out,
    scales,
    rows,
    columns,
    row_stride,
    column_stride,
    height,
    width,
    blocks_a_row,
    LARGEST: tl.constexpr,
    WIRE: tl.constexpr,
    TINY: tl.constexpr,
    BF16_MAX: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_previous_kernel(EARLY)
    program = tl.program_id(0)
    row0 = (program // blocks_a_row) * height
    column0 = (program % blocks_a_row) * width
    rows_end = tl.minimum(row0 + height, rows)
    columns_end = tl.minimum(column0 + width, columns)
    if ROW_TILES * COLUMN_TILES == 1:
        row = row0 + tl.arange(0, TILE_ROWS)
        column = column0 + tl.arange(0, TILE_COLUMNS)
        values = _load(weight, row, column, rows_end, columns_end, row_stride, column_stride, "evict_first")
        amax = _largest(values, 0.0)
        scale = _scale(amax, LARGEST, WIRE, TINY)
        _store(payload, values, scale, row, column, rows_end, columns_end, columns, LARGEST, WIRE, BF16_MAX, NATIVE)
    else:
        amax = 0.0
        for r in range(ROW_TILES):
            for c in range(COLUMN_TILES):
                row = row0 + r * TILE_ROWS + tl.arange(0, TILE_ROWS)
                column = column0 + c * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
                values = _load(weight, row, column, rows_end, columns_end, row_stride, column_stride, "")
                amax = _largest(values, amax)
        scale = _scale(amax, LARGEST, WIRE, TINY)
        for r in range(ROW_TILES):
            for c in range(COLUMN_TILES):
                row = row0 + r * TILE_ROWS + tl.arange(0, TILE_ROWS)
                column = column0 + c * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
                values = _load(weight, row, column, rows_end, columns_end, row_stride, column_stride, "evict_first")
                _store(
                    payload, values, scale, row, column, rows_end, columns_end, columns, LARGEST, WIRE, BF16_MAX, NATIVE
                )
    tl.store(amax_out + program, amax)
    tl.store(scales + program, scale)


@triton.jit
def quantize_rows_kernel(
    weight,
    payload,
    amax_out,
    scales,
    rows,
    columns,
    row_stride,
    column_stride,
    LARGEST: tl.constexpr,
    WIRE: tl.constexpr,
    TINY: tl.constexpr,
    BF16_MAX: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Blocks of one whole row, TILE_ROWS of them a program."""
    after_previous_kernel(EARLY)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    values = _load(weight, row, column, rows, columns, row_stride, column_stride, "evict_first")
    amax = _largest_a_row(values)
    scale = _scale(amax, LARGEST, WIRE, TINY)
    _store(payload, values, scale[:, None], row, column, rows, columns, columns, LARGEST, WIRE, BF16_MAX, NATIVE)
    tl.store(amax_out + row, amax, mask=row < rows)
    tl.store(scales + row, scale, mask=row < rows)
