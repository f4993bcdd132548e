"""Reference of `dequantize_blocks`: plain torch, fp32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.quantize_blocks.reference import expand_scales

__all__ = ["dequantize_blocks"]


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
    shape = (payload.shape[0], payload.shape[1])
    return out.copy_(payload.float() * expand_scales(scales, shape, block))
