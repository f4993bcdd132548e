"""Reference of `moe_expert_ffn`: plain torch, fp32 inside, one expert after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["moe_expert_ffn"]


def moe_expert_ffn(batch: ExpertBatch, w13: Tensor, w2: Tensor, *, activation: str = "silu") -> Tensor:
    """See the contract. Reads the counts on the host, so it cannot be captured in a graph."""
    counts = batch.expert_counts.tolist()
    if batch.layout == "flat":
        return _flat(batch, counts, w13, w2, activation)
    y = torch.zeros_like(batch.x)
    starts = [] if batch.expert_starts is None else batch.expert_starts.tolist()
    for expert, count in enumerate(counts):
        if not count:
            continue
        if batch.layout == "masked":
            x, target = batch.x[expert, :count], y[expert, :count]
        else:
            rows = slice(starts[expert], starts[expert] + count)
            x, target = batch.x[rows], y[rows]
        target.copy_(_ffn(x, w13[expert], w2[expert], activation))
    return y


def _flat(batch: ExpertBatch, counts: list[int], w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    y = torch.zeros(batch.x.shape, dtype=torch.float32, device=batch.x.device)
    for expert, count in enumerate(counts):
        if not count:
            continue
        chosen = batch.topk_ids == expert
        rows = chosen.any(1).nonzero().squeeze(1)
        gates = torch.where(chosen, batch.topk_weights, 0.0).sum(1)[rows]
        y[rows] += gates.unsqueeze(1) * _ffn(batch.x[rows], w13[expert], w2[expert], activation)
    return y.to(batch.x.dtype)


def _ffn(x: Tensor, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    gate, up = (x.float() @ w13.float().T).chunk(2, 1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return (active * up) @ w2.float().T
