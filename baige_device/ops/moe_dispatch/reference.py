"""Reference of `moe_dispatch`: one row a (token, rank) over the wire, laid out for the experts on arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.ops.moe_dispatch.exchange import agree, exchange_rows, join_columns, split_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DispatchHandle", "moe_dispatch"]


@dataclass(frozen=True)
class DispatchHandle:
    """How the rows travelled, for the way back."""

    group: ProcessGroup | None
    tokens: int
    """Tokens that this rank dispatched."""
    sent_tokens: Tensor
    """int64 `[S]`: the token of each row that this rank sent, ordered by (destination, token)."""
    sends: list[int]
    receives: list[int]
    """Rows to and from each rank."""
    entry_rows: Tensor | None = None
    """expert_major and masked: int64 `[X]`, the received row of each (token, expert) entry, in expert order."""
    entry_slots: Tensor | None = None
    """int64 `[X]`: where the entry lies in the layout, as a row of x flattened to `[rows, H]`."""
    entry_weights: Tensor | None = None
    """fp32 `[X]`: its router weight."""


def moe_dispatch(
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
    """See the contract. Reads the counts on the host, so it cannot be captured in a graph."""
    rank, size = group_rank_and_size(group)
    local = num_experts // size
    ids = topk_ids.to(torch.int32)
    owners = torch.where(ids >= 0, ids // local, -1)
    wanted = (owners.unsqueeze(0) == torch.arange(size, device=x.device).view(-1, 1, 1)).any(2)
    sends = wanted.sum(1).tolist()
    receives = agree("moe_dispatch", x.shape[0], max_tokens_per_rank, sends, group, x.device)
    sent = wanted.nonzero()[:, 1]

    columns = [x, ids, topk_weights] if x_scales is None else [x, ids, topk_weights, x_scales]
    packed = exchange_rows(join_columns(columns)[sent], sends, receives, group)
    x_in, ids_in, weights_in, *rest = split_columns(packed, columns)
    scales_in = rest[0] if rest else None
    here = (ids_in >= 0) & (ids_in // local == rank)
    ids_in = torch.where(here, ids_in - rank * local, -1)

    handle = DispatchHandle(group, x.shape[0], sent, sends, receives)
    if layout == "flat":
        counts = _membership(ids_in, local).sum(0, dtype=torch.int32)
        weights_in = torch.where(here, weights_in, 0.0)
        return ExpertBatch(layout, x_in, counts, None, ids_in, weights_in, scales_in, handle)
    return _by_expert(handle, layout, x_in, ids_in, weights_in, scales_in, local, alignment, max_tokens_per_rank * size)


def _membership(ids: Tensor, experts: int) -> Tensor:
    """bool `[R, E]`: does row r go to expert e?"""
    table = torch.zeros(ids.shape[0], experts + 1, dtype=torch.bool, device=ids.device)
    return table.scatter_(1, torch.where(ids >= 0, ids, experts).long(), True)[:, :experts]


def _by_expert(
    handle: DispatchHandle,
    layout: str,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    experts: int,
    alignment: int,
    expert_rows: int,
) -> ExpertBatch:
    """Lay received rows out by expert; within an expert they keep their order, which is (source rank, token)."""
    member = _membership(ids, experts)
    counts = member.sum(0)
    expert, row = member.T.nonzero().unbind(1)
    rank_in_expert = torch.arange(row.numel(), device=x.device) - (counts.cumsum(0) - counts)[expert]
    gates = torch.zeros(ids.shape[0], experts + 1, dtype=torch.float32, device=x.device)
    gates.scatter_add_(1, torch.where(ids >= 0, ids, experts).long(), weights)

    starts = None
    if layout == "masked":
        shape: tuple[int, ...] = (experts, expert_rows)
        slots = expert * expert_rows + rank_in_expert
    else:
        padded = (counts + alignment - 1) // alignment * alignment
        starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
        shape = (int(starts[-1]),)
        slots = starts[expert] + rank_in_expert
        starts = starts.int()
    laid_x = _lay_out(x, row, slots, shape)
    laid_scales = None if scales is None else _lay_out(scales, row, slots, shape)
    handle = DispatchHandle(
        handle.group,
        handle.tokens,
        handle.sent_tokens,
        handle.sends,
        handle.receives,
        entry_rows=row,
        entry_slots=slots,
        entry_weights=gates[row, expert],
    )
    return ExpertBatch(layout, laid_x, counts.int(), starts, None, None, laid_scales, handle)


def _lay_out(source: Tensor, rows: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows of `source` `[R, W]` at their slots of a zeroed `[*shape, W]`, moved as bytes."""
    laid = torch.zeros(*shape, source.shape[1], dtype=source.dtype, device=source.device)
    laid.flatten(0, -2).view(torch.uint8)[slots] = source.view(torch.uint8)[rows]
    return laid
