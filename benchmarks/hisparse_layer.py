"""What surrounds sparse attention in a decode step of one DeepSeek-V3.2 layer: random weights at its real shape."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CONTEXTS", "HEADS", "HOT_TOKENS", "ROW_BYTES", "SCALE", "TOPK", "DsaLayer", "topk_stream"]

HEADS, LATENT, ROPE, NOPE, V_DIM, Q_LORA, HIDDEN = 128, 512, 64, 128, 128, 1536, 7168
ROW_BYTES, TOPK, HOT_TOKENS = 656, 2048, 4096
SCALE = (NOPE + ROPE) ** -0.5
CONTEXTS = {"60K": 937 * 64, "200K": 3124 * 64}
_FP8 = torch.float8_e4m3fn


class DsaLayer:
    """Weights of one layer: fp8 for the two large projections, as in the checkpoint, bf16 for the absorbed ones.

    Scales are one per tensor here, not one per 128 x 128 block: fewer instructions, so less to hide a transfer behind.
    """

    def __init__(self) -> None:
        self._q_b = _fp8_weight(HEADS * (NOPE + ROPE), Q_LORA)
        self._o = _fp8_weight(HIDDEN, HEADS * V_DIM)
        self._w_uk = (torch.randn(HEADS, NOPE, LATENT, device="cuda") * NOPE**-0.5).bfloat16()
        self._w_uv = (torch.randn(HEADS, LATENT, V_DIM, device="cuda") * LATENT**-0.5).bfloat16()
        self._one = torch.ones((), device="cuda")

    def queries(self, q_a: Tensor) -> Tensor:
        """From the normed low-rank queries bf16 `[T, 1536]` to absorbed ones `[T, 128, 576]`: q_b_proj and W_UK."""
        q = self._product(q_a, self._q_b).view(-1, HEADS, NOPE + ROPE)
        out = torch.empty(q.shape[0], HEADS, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
        out[..., :LATENT] = torch.bmm(q[..., :NOPE].transpose(0, 1), self._w_uk).transpose(0, 1)
        out[..., LATENT:] = q[..., NOPE:]
        return out

    def output(self, attended: Tensor) -> Tensor:
        """From `[T, 128, 512]` to the layer's output bf16 `[T, 7168]`: W_UV and o_proj."""
        values = torch.bmm(attended.transpose(0, 1), self._w_uv).transpose(0, 1)
        return self._product(values.reshape(-1, HEADS * V_DIM), self._o)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch._scaled_mm(x.to(_FP8), weight, self._one, self._one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _fp8_weight(rows: int, columns: int) -> Tensor:
    """`[columns, rows]` column-major, as the product wants its second operand."""
    return (torch.randn(rows, columns, device="cuda") * columns**-0.5).to(_FP8).t()


def topk_stream(batch: int, misses: int, context: int) -> list[Tensor]:
    """Wanted positions int32 `[batch, 2048]` of successive steps, each with exactly `misses` new ones, in a ring.

    A position comes back only after the LRU of a hot buffer of 4096 has evicted it. The newest token is not wanted:
    SGLang's kernel looks for it in a slot of its own.
    """
    steps = -(-(HOT_TOKENS + 512) // misses)
    length = steps * misses
    ring = torch.rand(batch, context - 1, device="cuda").topk(length, dim=1).indices.int()
    window = torch.arange(TOPK, device="cuda")
    return [ring[:, (step * misses + window) % length].contiguous() for step in range(steps)]
