"""`dequantize_blocks` in Triton: one pass, several elements a thread in flight."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from baige_device.backends.portable.dequantize_kernels import dequantize_kernel
from baige_device.backends.portable.early_start import early_start
from baige_device.backends.portable.float_codec import has_native_e4m3
from baige_device.backends.portable.runtime import INTERPRET, launching_on
from baige_device.errors import ContractError

__all__ = ["dequantize_blocks"]

_TILE = 8192
_WARPS = 4


def dequantize_blocks(
    payload: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """See the contract."""
    out = torch.empty(payload.shape, dtype=dtype, device=payload.device) if out is None else out
    if payload.numel() == 0:
        return out
    rows, columns = payload.shape
    for name, tensor in (("payload", payload), ("out", out)):
        if tensor.stride(1) != 1 and columns > 1:
            raise ContractError("dequantize_blocks", f"{name}.stride", "dense rows", str(list(tensor.stride())))
    height, width = block[0], block[1] or columns
    tile_columns = min(triton.next_power_of_2(columns), _common_power_of_2(width) if width < columns else 256)
    tile_rows = min(triton.next_power_of_2(rows), _TILE // tile_columns)
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns))
    software = payload.dtype == torch.float8_e4m3fn and not has_native_e4m3(payload.device)
    encoded = INTERPRET and out.dtype == torch.bfloat16
    with launching_on(payload):
        dequantize_kernel[grid](
            payload.view(torch.uint8) if software else payload,
            scales,
            out.view(torch.int16) if encoded else out,
            rows,
            columns,
            payload.stride(0),
            out.stride(0),
            scales.stride(0),
            scales.stride(1),
            height,
            width,
            SOFTWARE=software,
            ENCODED=encoded,
            ONE_ROW_OF_SCALES=width % tile_columns == 0 or width >= columns,
            ONE_SCALE_DOWN=height % tile_rows == 0,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            num_warps=_WARPS,
            **early_start(payload.device),
        )
    return out


def _common_power_of_2(width: int) -> int:
    """The tile width for blocks of `width` columns: a power of two that divides it, or 256 when only small ones do."""
    largest = min(width & -width, 256)
    return largest if largest >= 64 else 256
