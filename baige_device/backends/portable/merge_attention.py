"""`merge_attention` in Triton: bound by memory, one pass over both parts."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.portable.runtime import launching_on, power_of_2
from baige_device.backends.portable.softmax_kernels import merge_attention_kernel

__all__ = ["merge_attention"]

_ELEMENTS_PER_PROGRAM = 4096


def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `baige_device/ops/merge_attention/contract.py`."""
    tokens, heads, width = out_a.shape
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device) if out is None else out
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device) if lse is None else lse
    rows = tokens * heads
    if rows == 0:
        return out, lse
    block = power_of_2(width)
    per_program = max(1, _ELEMENTS_PER_PROGRAM // block)
    with launching_on(out_a):
        merge_attention_kernel[(-(-rows // per_program),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            rows,
            heads,
            *out_a.stride(),
            *out_b.stride(),
            *out.stride()[:2],
            *lse_a.stride(),
            *lse_b.stride(),
            *lse.stride(),
            WIDTH=width,
            WIDTH_BLOCK=block,
            ROWS=per_program,
        )
    return out, lse
