"""Attention results as kernels leave them, brought to the contract's form, and their merge by LSE."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, vendor

__all__ = ["deliver", "lse_of_sums", "merge", "merge_attention", "merge_attention_portable"]


def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract; bf16 and fp16. One more pass keeps a part without weight from touching the result."""
    return deliver(*merge(out_a, lse_a, out_b, lse_b), None, out, lse)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`attention_merge_stage` on fresh buffers; what it does with an LSE of -inf is undocumented and not relied on."""
    merged = normalise.zeros(out_a.shape, out_a.dtype, out_a.device)
    total = normalise.filled_lse(out_a.shape[0], out_a.shape[1], out_a.device)
    if out_a.numel():
        parts = [normalise.dense(part) for part in (out_a, lse_a, out_b, lse_b)]
        vendor.kernel_module().attention_merge_stage(*parts, merged, total)
    return _without_empty(out_a, lse_a, out_b, lse_b, merged, total)


def merge_attention_portable(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract. Plain torch, fp32 inside; no sync."""
    peak = torch.maximum(lse_a, lse_b)
    shift = torch.where(peak == -math.inf, 0.0, peak)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    weight = weight_a + weight_b
    summed = out_a.float() * weight_a.unsqueeze(2) + out_b.float() * weight_b.unsqueeze(2)
    merged = (summed / weight.unsqueeze(2)).to(out_a.dtype)
    total = shift + torch.log(weight)
    return deliver(*_without_empty(out_a, lse_a, out_b, lse_b, merged, total), None, out, lse)


def _without_empty(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, merged: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Where one part is empty the other one is the result, bit for bit; where both are, zeros and -inf."""
    no_a, no_b = lse_a == -math.inf, lse_b == -math.inf
    merged = torch.where(no_b.unsqueeze(2), out_a, torch.where(no_a.unsqueeze(2), out_b, merged))
    merged = merged.masked_fill((no_a & no_b).unsqueeze(2), 0.0)
    return merged, torch.where(no_b, lse_a, torch.where(no_a, lse_b, total))


def lse_of_sums(peaks: Tensor, sums: Tensor) -> Tensor:
    """Natural-log LSE of a decode kernel's row maxima and row sums; -inf where nothing was summed."""
    return torch.where(sums > 0, peaks + torch.log(sums), -math.inf)


def deliver(
    result: Tensor, total: Tensor, seen: Tensor | None, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Put a result into the caller's buffers. Rows that saw no key (`seen` bool `[T]`) become zeros and -inf."""
    if seen is not None:
        result = torch.where(seen.view(-1, 1, 1), result, 0.0)
        total = torch.where(seen.view(-1, 1), total, -math.inf)
    result = result if out is None else out.copy_(result)
    return result, total if lse is None else lse.copy_(total)
