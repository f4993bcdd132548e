"""Contract of `dequantize_blocks`."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import (
    Cost,
    OpContract,
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
)
from baige_device.ops.quantize_blocks.contract import FLOAT_DTYPES, WIRE_FORMATS, check_block, scale_shape

__all__ = ["CONTRACT", "dequantize_blocks"]

_OP = "dequantize_blocks"


def dequantize_blocks(  # type: ignore[empty-body]
    payload: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each block of a quantised weight by its scale.

    Args:
        payload: `[M, N]` of a wire format's dtype (float8_e4m3fn, int8 or bf16); rows dense.
        scales: fp32 `[ceil(M/bm), ceil(N/bn)]`.
        block: as given to `quantize_blocks`.
        dtype: bf16, fp16 or fp32; ignored when `out` is given.
        out: `[M, N]` buffer, rows dense; every element is written. None allocates.
    Returns:
        the weight `[M, N]`: the product to fp32 accuracy (some chips hold the absmax instead of the scale, which
        costs up to three more fp32 roundings), rounded once to the output dtype.
    Raises:
        ContractError: shapes or dtypes differ.
    Cost: reads M*N bytes, writes M*N elements; no synchronisation.
    """


def check(
    values: bool,
    payload: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> None:
    check_dtype(_OP, "payload", payload, [dtype for dtype, _ in WIRE_FORMATS.values()])
    check_dtype(_OP, "scales", scales, (torch.float32,))
    check_shape(_OP, "payload", payload, ("M", "N"))
    check_inner_contiguous(_OP, "payload", payload)
    check_block(_OP, block)
    check_shape(_OP, "scales", scales, scale_shape(payload.shape[0], payload.shape[1], block))
    check_same_device(_OP, payload=payload, scales=scales, out=out)
    if out is not None:
        check_dtype(_OP, "out", out, FLOAT_DTYPES)
        check_shape(_OP, "out", out, tuple(payload.shape))
        check_inner_contiguous(_OP, "out", out)
    elif dtype not in FLOAT_DTYPES:
        got = str(dtype) if isinstance(dtype, torch.dtype) else f"the {type(dtype).__name__} {dtype!r}"
        raise ContractError(_OP, "dtype", "torch.bfloat16, torch.float16 or torch.float32", got)


def cost(
    payload: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Cost:
    """Bytes read and written."""
    width = (dtype if out is None else out.dtype).itemsize
    return Cost(payload.numel() * (payload.element_size() + width) + 4 * scales.numel())


CONTRACT = OpContract(
    _OP,
    "weights",
    dequantize_blocks,
    check,
    cost,
    "dequantize_blocks(Tensor payload, Tensor scales, *, int[2] block=[128, 128], ScalarType dtype=bfloat16) -> Tensor",
)
