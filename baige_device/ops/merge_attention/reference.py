"""Reference of `merge_attention`: plain torch, fp32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_attention"]


def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    top = torch.maximum(lse_a, lse_b)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    merged_lse = total.log() + top
    norm = total.masked_fill(total == 0.0, 1.0).unsqueeze(-1)
    merged = (_weighted(out_a, lse_a, weight_a) + _weighted(out_b, lse_b, weight_b)) / norm
    # Written last, so that the buffers may be those of a part.
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format) if out is None else out
    return out.copy_(merged), merged_lse if lse is None else lse.copy_(merged_lse)


def _weighted(part: Tensor, lse: Tensor, weight: Tensor) -> Tensor:
    absent = (lse == -torch.inf).unsqueeze(-1)
    return part.float().masked_fill(absent, 0.0) * weight.unsqueeze(-1)
