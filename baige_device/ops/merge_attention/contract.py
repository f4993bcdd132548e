"""Contract of `merge_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.attend_paged.contract import FLOATS, check_out
from baige_device.ops.base import Cost, OpContract, check_dtype, check_same_device, check_shape

__all__ = ["CONTRACT", "merge_attention"]

_OP = "merge_attention"


def merge_attention(  # type: ignore[empty-body]
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint KV sets into attention over their union (FlashDecoding's LSE merge).

    Args:
        out_a, out_b: `[T, H, Dv]` bf16, fp16 or fp32 of one dtype. lse_a, lse_b: fp32 `[T, H]`, natural log.
        out, lse: buffers; None allocates. They may be the buffers of part a.
    Returns:
        out `[T, H, Dv]` and lse fp32 `[T, H]`. A part with lse = -inf has no weight, whatever its output holds; both
        -inf give 0 and -inf.
    Raises:
        ContractError: shapes or dtypes differ.
    Cost: reads both parts once.
    """


def check(
    values: bool,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    check_dtype(_OP, "out_a", out_a, FLOATS)
    check_shape(_OP, "out_a", out_a, ("T", "H", "Dv"))
    check_shape(_OP, "out_b", out_b, tuple(out_a.shape))
    check_dtype(_OP, "out_b", out_b, (out_a.dtype,))
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_dtype(_OP, name, tensor, (torch.float32,))
        check_shape(_OP, name, tensor, tuple(out_a.shape[:2]))
    check_same_device(_OP, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_out(_OP, out_a, out_a.shape[2], out, lse)


def cost(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Cost:
    """Bytes read and written, and FLOPs."""
    return Cost(3 * (out_a.numel() * out_a.element_size() + 4 * lse_a.numel()), 3 * out_a.numel())


CONTRACT = OpContract(
    _OP,
    "attention",
    merge_attention,
    check,
    cost,
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
)
