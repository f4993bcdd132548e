"""Reference of `quantize_blocks`: plain torch, fp32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.quantize_blocks.contract import WIRE_FORMATS, scale_shape

__all__ = ["expand_scales", "quantize_blocks"]


def quantize_blocks(
    weight: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    wire: str = "fp8_e4m3",
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    dtype, largest = WIRE_FORMATS[wire]
    amax = _block_amax(weight, block)
    _refuse_nonfinite(amax, name)
    if not largest:
        limit = torch.finfo(dtype).max
        return weight.float().clamp(-limit, limit).to(dtype).contiguous(), torch.ones_like(amax)
    scales = amax / largest
    # Dividing by a subnormal overflows; those weights are zero on any 8-bit grid that holds a normal number.
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    scaled = weight.float() / expand_scales(scales, (weight.shape[0], weight.shape[1]), block)
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype).contiguous(), scales


def expand_scales(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The scale of every element, broadcastable to `shape`."""
    tall = scales.repeat_interleave(block[0], 0)[: shape[0]] if block[0] > 1 else scales
    if block[1] == 0 or block[1] >= shape[1]:
        return tall
    return tall.repeat_interleave(block[1], 1)[:, : shape[1]]


def _block_amax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 largest magnitude of every block; a NaN or inf in a block makes it NaN or inf."""
    rows, columns = weight.shape
    shape = scale_shape(rows, columns, block)
    if weight.numel() == 0:
        return torch.ones(shape, dtype=torch.float32, device=weight.device)
    height, width = block[0], block[1] or columns
    padded = torch.nn.functional.pad(weight.abs(), (0, shape[1] * width - columns, 0, shape[0] * height - rows))
    return padded.view(shape[0], height, shape[1], width).amax((1, 3)).float()


def _refuse_nonfinite(amax: Tensor, name: str) -> None:
    bad = ~amax.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        argument = f"weight {name!r}" if name else "weight"
        got = str(float(amax[row, column]))
        raise ContractError("quantize_blocks", argument, "finite numbers", f"{got} in block [{row}, {column}]")
