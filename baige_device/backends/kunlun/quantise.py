"""`quantize_blocks` and `dequantize_blocks` for the `int8_absmax` wire: one block is one row of the vendor's kernels.

The chip has no float8 arithmetic and no float8 copies, so int8 with a factor per block is its only compact wire. The
vendor's factor is the block's absolute maximum; the contract's is the scale, 127 times smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baige_device.backends.kunlun import normalise, vendor
from baige_device.errors import ContractError
from baige_device.ops.quantize_blocks.contract import scale_shape

__all__ = ["dequantize_blocks", "quantize_blocks"]


def quantize_blocks(
    weight: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    wire: str = "fp8_e4m3",
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """See the contract; only `wire="int8_absmax"`. Blocks of several rows cost a copy that brings them into rows."""
    if wire != "int8_absmax":
        raise ContractError("quantize_blocks", "wire", "int8_absmax (Kunlun has no float8)", repr(wire))
    shape = scale_shape(weight.shape[0], weight.shape[1], block)
    if 0 in weight.shape:
        return (
            weight.new_zeros(weight.shape, dtype=torch.int8),
            weight.new_ones(shape, dtype=torch.float32),
        )
    _refuse_non_finite(weight, block, name)
    blocks = normalise.dense(_to_rows(weight, block))
    payload = normalise.zeros(blocks.shape, torch.int8, weight.device)
    absmax = normalise.zeros((blocks.shape[0], 1), torch.float32, weight.device)
    vendor.kernel_module().quant2d(blocks, payload, absmax, force_sdnn=True)
    scales = normalise.scale_of_absmax(absmax)
    tiny = scales < torch.finfo(torch.float32).tiny
    scales = torch.where(tiny, 1.0, scales)
    payload = torch.where(tiny, 0, payload)
    return _from_rows(payload, weight.shape, block), scales.view(shape)


def dequantize_blocks(
    payload: Tensor,
    scales: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """See the contract; only int8 payloads. Blocks of several rows cost a copy in and a copy out."""
    if payload.dtype != torch.int8:
        raise ContractError("dequantize_blocks", "payload.dtype", "int8 (Kunlun has no float8)", str(payload.dtype))
    dtype = dtype if out is None else out.dtype
    target = payload.new_empty(payload.shape, dtype=dtype) if out is None else out
    if payload.numel():
        blocks = normalise.dense(_to_rows(payload, block))
        decoded = normalise.zeros(blocks.shape, dtype, payload.device)
        absmax = normalise.dense(normalise.absmax_of_scale(scales)).view(-1, 1)
        vendor.kernel_module().dequant2d_per_token(blocks, absmax, decoded, is_absmax=True)
        target.copy_(_from_rows(decoded, payload.shape, block))
    return target


def _to_rows(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """`[number of blocks, elements of a block]`; edge blocks are filled up with zeros."""
    height, width = block[0], block[1] or matrix.shape[1]
    if height == 1 and width == matrix.shape[1]:
        return matrix
    down, across = -(-matrix.shape[0] // height), -(-matrix.shape[1] // width)
    padded = functional.pad(matrix, (0, across * width - matrix.shape[1], 0, down * height - matrix.shape[0]))
    return padded.view(down, height, across, width).transpose(1, 2).reshape(down * across, height * width)


def _from_rows(blocks: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Undo `_to_rows`; contiguous `[M, N]`."""
    height, width = block[0], block[1] or shape[1]
    if height == 1 and width == shape[1]:
        return blocks
    down, across = -(-shape[0] // height), -(-shape[1] // width)
    matrix = blocks.view(down, across, height, width).transpose(1, 2).reshape(down * height, across * width)
    return matrix[: shape[0], : shape[1]].contiguous()


def _refuse_non_finite(weight: Tensor, block: tuple[int, int], name: str) -> None:
    finite = torch.isfinite(weight)
    if bool(finite.all()):
        return
    row, column = (~finite).nonzero()[0].tolist()
    at = (row // block[0], column // (block[1] or weight.shape[1]))
    value = float(weight[row, column])
    raise ContractError("quantize_blocks", "weight", "finite values", f"{value} in weight {name!r}, block {at}")
