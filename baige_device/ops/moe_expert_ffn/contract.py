"""Contract of `moe_expert_ffn`."""

from __future__ import annotations

from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.attend_paged.contract import FLOATS
from baige_device.ops.base import Cost, OpContract, check_dtype, check_same_device, check_shape
from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["ACTIVATIONS", "CONTRACT", "moe_expert_ffn"]

_OP = "moe_expert_ffn"
ACTIVATIONS = ("silu", "gelu")


def moe_expert_ffn(  # type: ignore[empty-body]
    batch: ExpertBatch, w13: Tensor, w2: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Run the local experts' gated feed-forward: `w2 · (act(w1·x) * (w3·x))`.

    Args:
        batch: from `moe_dispatch`, any layout, payload of the weights' dtype (no scales).
        w13: `[E, 2·I, H]`, gate rows first, then up rows. w2: `[E, H, I]`.
        activation: `silu` or `gelu` (tanh form).
    Returns:
        y of `batch.x`'s shape and dtype. expert_major and masked: one row per (token, expert), unweighted, zeros in
        padding. flat: per token the router-weighted sum over its local experts.
    Raises:
        ContractError: shapes, dtypes, unknown activation, or a scaled payload.
    Cost: 6·H·I FLOPs a row and expert; reads the weights of every expert that has tokens.
    """


def check(values: bool, batch: ExpertBatch, w13: Tensor, w2: Tensor, *, activation: str = "silu") -> None:
    experts, hidden = batch.expert_counts.shape[0], batch.x.shape[-1]
    check_dtype(_OP, "w13", w13, FLOATS)
    check_shape(_OP, "w13", w13, (experts, "2I", hidden))
    if w13.shape[1] % 2:
        raise ContractError(_OP, "w13.shape[1]", "an even number (gate and up rows)", str(w13.shape[1]))
    check_shape(_OP, "w2", w2, (experts, hidden, w13.shape[1] // 2))
    check_dtype(_OP, "w2", w2, (w13.dtype,))
    check_dtype(_OP, "batch.x", batch.x, (w13.dtype,))
    if batch.scales is not None:
        raise ContractError(_OP, "batch.scales", "None (dequantise the payload first)", "scales")
    if activation not in ACTIVATIONS:
        raise ContractError(_OP, "activation", " or ".join(ACTIVATIONS), repr(activation))
    check_same_device(_OP, x=batch.x, w13=w13, w2=w2)


def cost(batch: ExpertBatch, w13: Tensor, w2: Tensor, *, activation: str = "silu") -> Cost:
    """Bytes of all weights, and FLOPs of the rows received; reads the counts."""
    rows = int(batch.expert_counts.sum())
    weights = w13.numel() * w13.element_size() + w2.numel() * w2.element_size()
    return Cost(weights, 6 * rows * w2.shape[1] * w2.shape[2])


CONTRACT = OpContract(_OP, "moe", moe_expert_ffn, check, cost)
