"""`quantize_blocks` in Triton: one read of the weight where a block fits in registers, two where it does not."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from baige_device.backends.portable.early_start import early_start
from baige_device.backends.portable.float_codec import has_native_e4m3
from baige_device.backends.portable.quantize_kernels import quantize_kernel, quantize_rows_kernel
from baige_device.backends.portable.runtime import launching_on
from baige_device.errors import ContractError
from baige_device.ops.quantize_blocks.contract import WIRE_FORMATS, scale_shape

__all__ = ["quantize_blocks", "quantize_into"]

_LARGEST_TILE = 16384
"""Elements of a block that one program holds at once: 32 registers a thread with 16 warps."""

_ROWS_TILE = 8192
"""Elements of whole rows that one program holds at once."""
_ROWS_WARPS = 4

_CODES = {"fp8_e4m3": torch.uint8, "int8_absmax": torch.int8, "bf16": torch.int16}
"""What the payload is written as where Triton does not convert to the wire's own type."""

_BF16_MAX = float(torch.finfo(torch.bfloat16).max)
_TINY = float(torch.finfo(torch.float32).tiny)


def quantize_blocks(
    weight: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    wire: str = "fp8_e4m3",
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """See the contract. Any strides are read in place."""
    rows, columns = weight.shape
    shape = scale_shape(rows, columns, block)
    payload = torch.empty((rows, columns), dtype=WIRE_FORMATS[wire][0], device=weight.device)
    amax = torch.ones(shape, dtype=torch.float32, device=weight.device)
    scales = torch.ones_like(amax)
    if weight.numel() > 0:
        quantize_into(weight, payload, amax, scales, block, wire)
        _refuse_nonfinite(amax, name)
    return payload, scales


def quantize_into(
    weight: Tensor, payload: Tensor, amax: Tensor, scales: Tensor, block: tuple[int, int], wire: str
) -> None:
    """The kernel alone, into given buffers and without looking at the result: it synchronises nothing.

    `amax` and `scales` are fp32 with one element a block; `amax` becomes inf where a block holds a NaN or an inf.
    """
    if block[0] == 1 and block[1] in (0, weight.shape[1]) and weight.shape[1] <= _LARGEST_TILE:
        _quantize_rows(weight, payload, amax, scales, wire)
        return
    rows, columns = weight.shape
    blocks_down, blocks_across = scale_shape(rows, columns, block)
    height, width = block[0], block[1] or columns
    tile_rows, tile_columns = _tile(min(height, rows), min(width, columns))
    with launching_on(weight):
        quantize_kernel[(blocks_down * blocks_across,)](
            weight,
            _writable(payload, wire),
            amax,
            scales,
            rows,
            columns,
            weight.stride(0),
            weight.stride(1),
            height,
            width,
            blocks_across,
            **_coding(weight.device, wire),
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            ROW_TILES=triton.cdiv(min(height, rows), tile_rows),
            COLUMN_TILES=triton.cdiv(min(width, columns), tile_columns),
            num_warps=_block_warps(tile_rows * tile_columns),
            **early_start(weight.device),
        )


def _quantize_rows(weight: Tensor, payload: Tensor, amax: Tensor, scales: Tensor, wire: str) -> None:
    """Blocks of one whole row that fits in registers: several rows a program, so that enough loads are in flight."""
    rows, columns = weight.shape
    tile_columns = triton.next_power_of_2(columns)
    tile_rows = max(1, min(triton.next_power_of_2(rows), _ROWS_TILE // tile_columns))
    with launching_on(weight):
        quantize_rows_kernel[(triton.cdiv(rows, tile_rows),)](
            weight,
            _writable(payload, wire),
            amax,
            scales,
            rows,
            columns,
            weight.stride(0),
            weight.stride(1),
            **_coding(weight.device, wire),
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            num_warps=_ROWS_WARPS,
            **early_start(weight.device),
        )


def _writable(payload: Tensor, wire: str) -> Tensor:
    """The payload as a type that Triton can write here."""
    return payload if has_native_e4m3(payload.device) else payload.view(_CODES[wire])


def _coding(device: torch.device, wire: str) -> dict[str, Any]:
    return {
        "LARGEST": WIRE_FORMATS[wire][1],
        "WIRE": wire,
        "TINY": _TINY,
        "BF16_MAX": _BF16_MAX,
        "NATIVE": has_native_e4m3(device),
    }


def _tile(height: int, width: int) -> tuple[int, int]:
    """Power-of-two tile of at most `_LARGEST_TILE` elements; wide first, since a row's elements are neighbours."""
    columns = min(triton.next_power_of_2(width), _LARGEST_TILE)
    return min(triton.next_power_of_2(height), _LARGEST_TILE // columns), columns


def _block_warps(elements: int) -> int:
    if elements >= _LARGEST_TILE:
        return 16
    return 8 if elements >= 4096 else 4


def _refuse_nonfinite(amax: Tensor, name: str) -> None:
    bad = ~amax.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        argument = f"weight {name!r}" if name else "weight"
        got = f"{float(amax[row, column])} in block [{row}, {column}]"
        raise ContractError("quantize_blocks", argument, "finite numbers", got)
