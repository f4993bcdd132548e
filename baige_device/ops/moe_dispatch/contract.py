"""Contract of `moe_dispatch`, and the batch type that the MoE ops pass on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import (
    INDEX_DTYPES,
    Cost,
    OpContract,
    check_dtype,
    check_index_values,
    check_inner_contiguous,
    check_number,
    check_same_device,
    check_shape,
    group_rank_and_size,
    raise_together,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CONTRACT", "LAYOUTS", "ExpertBatch", "moe_dispatch"]

_OP = "moe_dispatch"
LAYOUTS = ("flat", "expert_major", "masked")


@dataclass(frozen=True)
class ExpertBatch:
    """The tokens that this rank's experts received. E is the number of local experts."""

    layout: str
    x: Tensor
    """flat `[R, H]`: one row per (token, rank). expert_major `[R, H]`: one row per (token, expert), experts in order,
    each padded with zero rows to `alignment`. masked `[E, M, H]`: M = max_tokens_per_rank · N, zeros behind."""
    expert_counts: Tensor
    """int32 `[E]`: received tokens of each local expert (without padding)."""
    expert_starts: Tensor | None
    """expert_major: int32 `[E+1]`, first row of each expert, multiples of `alignment`; else None."""
    topk_ids: Tensor | None
    """flat: int32 `[R, k]`, local expert ids, -1 where the expert is not here; else None."""
    topk_weights: Tensor | None
    """flat: fp32 `[R, k]`; else None."""
    scales: Tensor | None
    """What became of `x_scales`, laid out like `x`; None when none was given."""
    handle: Any
    """Opaque; belongs to the backend and is consumed by `moe_combine` of the same backend."""


def moe_dispatch(  # type: ignore[empty-body]
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    layout: str,
    max_tokens_per_rank: int,
    group: ProcessGroup | None = None,
    alignment: int = 1,
    x_scales: Tensor | None = None,
) -> ExpertBatch:
    """Send every token to the ranks of its experts. Rank r of N owns experts `[r·E_all/N, (r+1)·E_all/N)`.

    Args:
        x: `[T, H]` payload, any dtype of one or two or four bytes, dense rows. T may be 0 and differ by rank.
        topk_ids: int32 or int64 `[T, k]`, global expert ids; -1 takes no part (padded tokens, dropped choices).
        topk_weights: fp32 `[T, k]` router weights; what stands beside a -1 has no effect, NaN included.
        num_experts: E_all, a multiple of N. layout: `flat`, `expert_major` or `masked`.
        max_tokens_per_rank: the largest T any rank may bring; must be equal on all ranks.
        group: process group; None is the default group, or one rank without torch.distributed.
        alignment: expert_major: row padding of each expert (for grouped GEMMs). x_scales: fp32 `[T, B]` scales of a
            quantised payload, sent along.
    Returns:
        `ExpertBatch`. N = 1 is a permutation. Rows of one expert keep the order (source rank, token).
    Raises:
        ContractError: bad arguments; with checked values on every rank, naming the rank, as soon as one rank's are bad
            (without, the other ranks wait for the one that raised).
        CapacityError: T > max_tokens_per_rank on some rank, or ranks that disagree on the maximum; raised on every
            rank, naming rank and numbers, before any payload moves.
    Cost: each token's row crosses the link once per remote rank (flat) or once per remote expert.
    """


def check(
    values: bool,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    layout: str,
    max_tokens_per_rank: int,
    group: ProcessGroup | None = None,
    alignment: int = 1,
    x_scales: Tensor | None = None,
) -> None:
    size = group_rank_and_size(group)[1]
    numbers = (num_experts, layout, max_tokens_per_rank, alignment)
    if not values or size == 1:
        _check(values, size, x, topk_ids, topk_weights, x_scales, *numbers)
        return
    error = None
    try:
        _check(values, size, x, topk_ids, topk_weights, x_scales, *numbers)
    except ContractError as own:
        error = own
    raise_together(_OP, error, group)


def _check(
    values: bool,
    size: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    x_scales: Tensor | None,
    num_experts: int,
    layout: str,
    max_tokens_per_rank: int,
    alignment: int,
) -> None:
    """This rank's arguments."""
    check_shape(_OP, "x", x, ("T", "H"))
    check_inner_contiguous(_OP, "x", x)
    if x.element_size() not in (1, 2, 4):
        raise ContractError(_OP, "x.dtype", "a dtype of one, two or four bytes", str(x.dtype).removeprefix("torch."))
    check_dtype(_OP, "topk_ids", topk_ids, INDEX_DTYPES)
    check_shape(_OP, "topk_ids", topk_ids, (x.shape[0], "k"))
    check_dtype(_OP, "topk_weights", topk_weights, (torch.float32,))
    check_shape(_OP, "topk_weights", topk_weights, tuple(topk_ids.shape))
    if layout not in LAYOUTS:
        raise ContractError(_OP, "layout", " or ".join(LAYOUTS), repr(layout))
    if num_experts < 1 or num_experts % size:
        raise ContractError(_OP, "num_experts", f"a positive multiple of the {size} ranks", str(num_experts))
    check_number(_OP, "alignment", alignment, 1)
    check_number(_OP, "max_tokens_per_rank", max_tokens_per_rank, 0)
    if x_scales is not None:
        check_dtype(_OP, "x_scales", x_scales, (torch.float32,))
        check_shape(_OP, "x_scales", x_scales, (x.shape[0], "B"))
    check_same_device(_OP, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_scales=x_scales)
    if values:
        check_index_values(_OP, "topk_ids", topk_ids, num_experts)


def cost(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    layout: str,
    max_tokens_per_rank: int,
    group: ProcessGroup | None = None,
    alignment: int = 1,
    x_scales: Tensor | None = None,
) -> Cost:
    """Bytes read and written by a local permutation (N = 1)."""
    copies = 1 if layout == "flat" else topk_ids.shape[1]
    return Cost(x.numel() * x.element_size() * (1 + copies))


CONTRACT = OpContract(_OP, "moe", moe_dispatch, check, cost)
