"""Contract of `moe_combine`."""

from __future__ import annotations

from torch import Tensor

from baige_device.ops.attend_paged.contract import FLOATS
from baige_device.ops.base import Cost, OpContract, check_dtype, check_inner_contiguous, check_same_device, check_shape
from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["CONTRACT", "moe_combine"]

_OP = "moe_combine"


def moe_combine(y: Tensor, batch: ExpertBatch, *, out: Tensor | None = None) -> Tensor:  # type: ignore[empty-body]
    """Bring expert outputs back to the ranks of their tokens and reduce them.

    Args:
        y: outputs in the layout and shape of `batch.x`, bf16, fp16 or fp32. Rows of padding are never read.
        batch: what `moe_dispatch` returned on this rank for the same step.
        out: `[T, H]` buffer of y's dtype, T the tokens this rank dispatched; every row is written. None allocates.
    Returns:
        `[T, H]`: expert_major and masked: sum over the token's experts of router weight · y, summed in fp32. flat: sum
        over ranks of y, which is already weighted. Tokens without any expert get zeros.
    Raises:
        ContractError: shapes or dtypes differ from the dispatched batch.
    Cost: the mirror image of dispatch. A collective: every rank of the group must call it.
    """


def check(values: bool, y: Tensor, batch: ExpertBatch, *, out: Tensor | None = None) -> None:
    check_dtype(_OP, "y", y, FLOATS)
    check_shape(_OP, "y", y, tuple(batch.x.shape))
    check_inner_contiguous(_OP, "y", y)
    check_same_device(_OP, y=y, x=batch.x, out=out)
    if out is not None:
        check_dtype(_OP, "out", out, (y.dtype,))
        check_shape(_OP, "out", out, ("T", y.shape[-1]))
        check_inner_contiguous(_OP, "out", out)


def cost(y: Tensor, batch: ExpertBatch, *, out: Tensor | None = None) -> Cost:
    """Bytes read by a local reduction (N = 1)."""
    return Cost(y.numel() * y.element_size())


CONTRACT = OpContract(_OP, "moe", moe_combine, check, cost)
