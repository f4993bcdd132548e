"""`moe_dispatch` and `moe_combine`: a transport between ranks, the vendor's sort, and `moe_post`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.kunlun import moe_exchange, normalise, rows, vendor
from baige_device.backends.kunlun.kv_write import HALF
from baige_device.backends.kunlun.moe_exchange import Arrived, Route
from baige_device.backends.kunlun.moe_sort import Sorted, live_choice, sort_by_expert, without_repeats
from baige_device.errors import ContractError
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.ops.moe_dispatch.exchange import agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Handle", "Send", "dispatch_over", "moe_combine", "moe_dispatch", "weighted_sum"]

_OP = "moe_dispatch"
Send = Callable[..., tuple[Route, Arrived]]
"""A transport, called as `moe_exchange.send`."""


@dataclass(frozen=True)
class Handle:
    """How the rows travelled and where they lie, for the way back."""

    tokens: int
    route: Route | None
    """None when the received rows are the tokens themselves."""
    slots: Tensor | None = None
    """int64 `[R, k]`: row of each choice in the layout, -1 for choices that are not here; None when flat."""
    weights: Tensor | None = None
    """fp32 `[R, k]`, 0 for choices that are not here; None when flat."""


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
    """See the contract. One rank and `masked`: fixed shapes, no sync."""
    return dispatch_over(
        moe_exchange.send,
        x,
        topk_ids,
        topk_weights,
        num_experts=num_experts,
        layout=layout,
        max_tokens_per_rank=max_tokens_per_rank,
        group=group,
        alignment=alignment,
        x_scales=x_scales,
    )


def dispatch_over(
    send: Send,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    layout: str,
    max_tokens_per_rank: int,
    group: ProcessGroup | None,
    alignment: int,
    x_scales: Tensor | None,
) -> ExpertBatch:
    """`moe_dispatch` over a transport, and the layout of what arrived."""
    rank, size = group_rank_and_size(group)
    local = num_experts // size
    ids, weights = without_repeats(topk_ids.to(torch.int32), topk_weights)
    if size == 1 and layout != "flat":
        agree(_OP, x.shape[0], max_tokens_per_rank, [x.shape[0]], group, x.device)
        handle = Handle(x.shape[0], None)
        arrived = Arrived(x, ids, weights, x_scales)
    else:
        route, arrived = send(x, ids, weights, x_scales, local, max_tokens_per_rank, group)
        handle = Handle(x.shape[0], route)
    here = (arrived.ids >= 0) & (torch.div(arrived.ids, local, rounding_mode="floor") == rank)
    ids = torch.where(here, arrived.ids - rank * local, -1)
    weights = torch.where(here, arrived.weights, 0.0)
    if layout == "flat":
        counts = (ids.unsqueeze(2) == torch.arange(local, device=x.device)).sum((0, 1)).to(torch.int32)
        return ExpertBatch(layout, arrived.x, counts, None, ids, weights, arrived.scales, handle)
    return _by_expert(handle, layout, arrived, ids, weights, local, alignment, max_tokens_per_rank * size)


def _by_expert(
    handle: Handle,
    layout: str,
    arrived: Arrived,
    ids: Tensor,
    weights: Tensor,
    experts: int,
    alignment: int,
    expert_rows: int,
) -> ExpertBatch:
    order = _sort(arrived.x, ids, experts)
    counts = order.starts.diff()
    starts = None
    if layout == "masked":
        first = torch.arange(experts, device=ids.device) * expert_rows
        shape: tuple[int, ...] = (experts, expert_rows)
    else:
        padded = torch.div(counts + alignment - 1, alignment, rounding_mode="floor") * alignment
        starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0)).to(torch.int32)
        first = starts[:-1]
        shape = (int(normalise.host_copy(starts[-1:])),)
    expert = ids.clamp(min=0).long()
    slots = torch.where(ids >= 0, first.long()[expert] + order.row_of - order.starts.long()[expert], -1)
    laid = _lay_out(arrived.x, slots, shape)
    scales = None if arrived.scales is None else _lay_out(arrived.scales, slots, shape)
    handle = Handle(handle.tokens, handle.route, slots, weights)
    return ExpertBatch(layout, laid, counts, starts, None, None, scales, handle)


def _sort(x: Tensor, ids: Tensor, experts: int) -> Sorted:
    """The vendor's order of the rows, which are moved as bytes later, so the kernel gets a narrow proxy."""
    if ids.numel() == 0:
        none = torch.zeros(ids.shape, dtype=torch.int32, device=x.device)
        return Sorted(x[:0], none, torch.zeros(experts + 1, dtype=torch.int32, device=x.device))
    return sort_by_expert(normalise.zeros((ids.shape[0], 64), torch.float16, x.device), ids, experts)


def _lay_out(source: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Row r of `source` at every slot of its choices, zeros elsewhere; `[*shape, W]`."""
    laid = torch.zeros(*shape, source.shape[1], dtype=source.dtype, device=source.device)
    flat = rows.as_bytes(laid.view(-1, 1, source.shape[1]))
    moved = rows.as_bytes(source).unsqueeze(1).expand(-1, slots.shape[1], -1)
    rows.put_rows(flat, slots.flatten(), moved.reshape(slots.numel(), flat.shape[2]))
    return laid


def moe_combine(y: Tensor, batch: ExpertBatch, *, out: Tensor | None = None) -> Tensor:
    """See the contract. Partial sums of several ranks travel in y's dtype and are added in fp32."""
    handle: Handle = batch.handle
    if out is not None and out.shape[0] != handle.tokens:
        raise ContractError("moe_combine", "out.shape[0]", f"{handle.tokens} dispatched tokens", str(out.shape[0]))
    reduced = y
    if handle.slots is not None and handle.weights is not None:
        reduced = weighted_sum(y.reshape(-1, y.shape[-1]), handle.slots, handle.weights)
    if handle.route is not None:
        reduced = handle.route.bring_home(reduced)
    return reduced if out is None else out.copy_(reduced)


def weighted_sum(y: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """`[R, H]`: sum over a token's choices of weight · `y[slot]`; slots int `[R, k]`, -1 is no choice."""
    live = slots >= 0
    result = normalise.zeros((slots.shape[0], y.shape[1]), y.dtype, y.device)
    if 0 in y.shape or slots.numel() == 0:
        return result
    index = live_choice(slots, live)
    gates = normalise.dense(torch.where(live, weights, 0.0))
    if y.dtype in HALF:
        ones = torch.ones_like(gates)
        vendor.kernel_module().moe_post(normalise.dense(y), normalise.int32(index), gates, ones, result)
    else:
        result = (y[index.long()].float() * gates.unsqueeze(2)).sum(1).to(y.dtype)
    return torch.where(live.any(1, keepdim=True), result, 0.0)
