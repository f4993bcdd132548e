"""`merge_attention` on the abacus chip."""

from __future__ import annotations

import torch

from baige_abacus.runtime import run


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine two partial attentions by their log-sum-exp; a part with -inf has no weight."""
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format) if lse is None else lse

    def work() -> None:
        largest = torch.maximum(lse_a, lse_b).clamp_min(torch.finfo(torch.float32).min)
        weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
        parts = [
            torch.where(weight[..., None] == 0, 0.0, part.float() * weight[..., None])
            for part, weight in ((out_a, weight_a), (out_b, weight_b))
        ]
        total = weight_a + weight_b
        out.copy_((parts[0] + parts[1]) / total.clamp_min(1.0)[..., None])
        lse.copy_(largest + total.log())

    run(work)
    return out, lse
