"""`moe_dispatch` in Triton: a counting sort and one pass over the payload; torch.distributed between ranks.

One rank: nothing is read on the host while a graph is captured. The row count of `flat` and `expert_major` is then its
upper bound, with zero rows (and ids -1) behind; outside a capture it is exact, which costs one host read.
Several ranks: the row counts decide the sizes of the exchange, so every call reads them and cannot be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.portable.moe_routing import Routing, lay_out, route
from baige_device.backends.portable.runtime import launching_on
from baige_device.errors import CapacityError
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.ops.moe_dispatch.exchange import agree, exchange_rows, join_columns, split_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PortableHandle", "moe_dispatch"]

_OP = "moe_dispatch"


@dataclass(frozen=True)
class PortableHandle:
    """How the rows travelled, for the way back."""

    group: ProcessGroup | None
    home: Tensor | None
    """int32 `[T, N]`: the row that token t sent to rank n, -1 for none; None when nothing was packed (one rank)."""
    sends: list[int]
    receives: list[int]
    tokens: int
    slots: Tensor | None = None
    """expert_major and masked: int32 `[R, k]`, where each choice of a received row lies in the flattened layout."""
    weights: Tensor | None = None
    """fp32 `[R, k]`, router weights of the received rows."""


@dataclass(frozen=True)
class _Arrived:
    """Rows on the rank of their experts, ordered by (source rank, token)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None
    handle: PortableHandle


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
    """See `baige_device/ops/moe_dispatch/contract.py`."""
    rank, size = group_rank_and_size(group)
    local = num_experts // size
    with launching_on(x):
        if size > 1:
            arrived = _exchange(x, topk_ids, topk_weights, x_scales, local, size, max_tokens_per_rank, group)
        else:
            if x.shape[0] > max_tokens_per_rank:
                raise CapacityError(
                    _OP,
                    "x.shape[0]",
                    f"at most max_tokens_per_rank = {max_tokens_per_rank}",
                    f"{x.shape[0]} tokens on rank 0",
                )
            handle = PortableHandle(group, None, [x.shape[0]], [x.shape[0]], x.shape[0])
            arrived = _Arrived(x, topk_ids, topk_weights, x_scales, handle)
        if layout == "flat":
            return _flat(arrived, rank * local, local, size)
        return _by_expert(arrived, layout, rank * local, local, alignment, max_tokens_per_rank * size)


def _owners(topk_ids: Tensor, local: int, size: int) -> Tensor:
    """int32 `[T, N]`: n where some choice of the token lives on rank n, else -1."""
    ranks = torch.arange(size, device=topk_ids.device, dtype=torch.int32)
    owner = torch.where(topk_ids >= 0, topk_ids // local, -1)
    wanted = (owner.unsqueeze(2) == ranks).any(1)
    return torch.where(wanted, ranks, -1)


def _exchange(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    local: int,
    size: int,
    capacity: int,
    group: ProcessGroup | None,
) -> _Arrived:
    """Send one row a (token, rank), payload and routing apart, so that the payload is packed in one pass."""
    routing = route(_owners(ids, local, size), 0, size)
    sends: list[int] = routing.counts.tolist()
    receives = agree(_OP, x.shape[0], capacity, sends, group, x.device)
    columns = [ids.to(torch.int32), weights] if scales is None else [ids.to(torch.int32), weights, scales]
    payload = lay_out(x, routing, sum(sends), clear=False)
    routed = lay_out(join_columns(columns), routing, sum(sends), clear=False)
    x_in = exchange_rows(payload.view(torch.uint8), sends, receives, group).view(x.dtype)
    parts = split_columns(exchange_rows(routed, sends, receives, group), columns)
    handle = PortableHandle(group, routing.slots, sends, receives, x.shape[0])
    return _Arrived(x_in, parts[0], parts[1], parts[2] if scales is not None else None, handle)


def _flat(arrived: _Arrived, first: int, local: int, size: int) -> ExpertBatch:
    ids = arrived.ids.to(torch.int32)
    here = (ids >= first) & (ids < first + local)
    ids = torch.where(here, ids - first, -1)
    weights = torch.where(here, arrived.weights, 0.0)
    x, scales, handle = arrived.x, arrived.scales, arrived.handle
    if size == 1:
        packing = route(_owners(ids, local, 1), 0, 1)
        rows = x.shape[0] if _capturing(x) else int(packing.counts)
        if rows != x.shape[0] or _capturing(x):
            x = lay_out(x, packing, rows, clear=True)
            scales = None if scales is None else lay_out(scales, packing, rows, clear=True)
            # 0 must stand for "no expert" in the cleared rows behind.
            ids = lay_out(ids + 1, packing, rows, clear=True) - 1
            weights = lay_out(weights, packing, rows, clear=True)
        else:
            x = x.clone()
        handle = replace(handle, home=packing.slots)
    counts = route(ids, 0, local).counts
    return ExpertBatch("flat", x, counts, None, ids, weights, scales, handle)


def _by_expert(arrived: _Arrived, layout: str, first: int, local: int, alignment: int, expert_rows: int) -> ExpertBatch:
    masked = layout == "masked"
    ids = arrived.ids
    routing = route(ids, first, local, alignment=alignment, capacity=expert_rows if masked else 0)
    rows = local * expert_rows if masked else _expert_major_rows(routing, ids, local, alignment)
    clear = masked or alignment > 1 or _capturing(ids)
    x = lay_out(arrived.x, routing, rows, clear=clear)
    scales = None if arrived.scales is None else lay_out(arrived.scales, routing, rows, clear=clear)
    handle = replace(arrived.handle, slots=routing.slots, weights=arrived.weights)
    if masked:
        x = x.view(local, expert_rows, x.shape[1])
        scales = None if scales is None else scales.view(local, expert_rows, scales.shape[1])
    return ExpertBatch(layout, x, routing.counts, None if masked else routing.starts, None, None, scales, handle)


def _expert_major_rows(routing: Routing, ids: Tensor, local: int, alignment: int) -> int:
    if _capturing(ids):
        return ids.numel() + local * (alignment - 1)
    return int(routing.starts[-1])


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
