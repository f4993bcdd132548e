"""`moe_dispatch` in Triton: a counting sort and one pass over the payload; torch.distributed between ranks.

While a graph is captured nothing is read on the host. The row count of `flat` and `expert_major` is then its upper
bound, with zero rows (and ids -1) behind; outside a capture it is exact, which costs a host read. Several ranks travel
as `moe_transport.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.portable.moe_routing import Routing, lay_out, route
from baige_device.backends.portable.moe_transport import Arrived, Way, capturing, owners, send
from baige_device.backends.portable.runtime import launching_on
from baige_device.errors import CapacityError
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.contract import ExpertBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PortableHandle", "lay_out_batch", "moe_dispatch"]

_OP = "moe_dispatch"


@dataclass(frozen=True)
class PortableHandle:
    """How the rows travelled, for the way back."""

    way: Way | None
    """None with one rank: rows go nowhere."""
    tokens: int
    arrived: int
    """Rows that came here, R."""
    slots: Tensor | None = None
    """int32 `[R, k]`: where the parts of a received row lie in the batch, -1 for none; None: row for row."""
    weights: Tensor | None = None
    """fp32 `[R, k]`, router weights of those parts; None where the experts' outputs are weighted already."""


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
            arrived = send(x, topk_ids, topk_weights, x_scales, local, max_tokens_per_rank, group)
        else:
            if x.shape[0] > max_tokens_per_rank:
                raise CapacityError(
                    _OP,
                    "x.shape[0]",
                    f"at most max_tokens_per_rank = {max_tokens_per_rank}",
                    f"{x.shape[0]} tokens on rank 0",
                )
            arrived = Arrived(x, topk_ids, topk_weights, x_scales, None, exact=False)
        return lay_out_batch(arrived, x.shape[0], layout, rank * local, local, alignment, max_tokens_per_rank * size)


def lay_out_batch(
    arrived: Arrived, tokens: int, layout: str, first: int, local: int, alignment: int, expert_rows: int
) -> ExpertBatch:
    """The batch of what arrived for the experts `[first, first + local)`; `tokens` is what this rank dispatched."""
    if layout == "flat":
        return _flat(arrived, tokens, first, local)
    return _by_expert(arrived, tokens, layout, first, local, alignment, expert_rows)


def _flat(arrived: Arrived, tokens: int, first: int, local: int) -> ExpertBatch:
    ids = arrived.ids.to(torch.int32)
    here = (ids >= first) & (ids < first + local)
    ids = torch.where(here, ids - first, -1)
    weights = torch.where(here, arrived.weights, 0.0)
    x, scales = arrived.x, arrived.scales
    handle = PortableHandle(arrived.way, tokens, x.shape[0])
    if not arrived.exact:
        packing = route(owners(ids, local, 1), 0, 1)
        rows = x.shape[0] if capturing(x) else int(packing.counts)
        if rows != x.shape[0] or capturing(x):
            x = lay_out(x, packing, rows, clear=True)
            scales = None if scales is None else lay_out(scales, packing, rows, clear=True)
            # 0 must stand for "no expert" in the cleared rows behind.
            ids = lay_out(ids + 1, packing, rows, clear=True) - 1
            weights = lay_out(weights, packing, rows, clear=True)
        else:
            x = x.clone()
        handle = PortableHandle(arrived.way, tokens, handle.arrived, packing.slots)
    counts = route(ids, 0, local).counts
    return ExpertBatch("flat", x, counts, None, ids, weights, scales, handle)


def _by_expert(
    arrived: Arrived, tokens: int, layout: str, first: int, local: int, alignment: int, expert_rows: int
) -> ExpertBatch:
    masked = layout == "masked"
    ids = arrived.ids
    routing = route(ids, first, local, alignment=alignment, capacity=expert_rows if masked else 0)
    rows = local * expert_rows if masked else _expert_major_rows(routing, ids, local, alignment)
    clear = masked or alignment > 1 or capturing(ids)
    x = lay_out(arrived.x, routing, rows, clear=clear)
    scales = None if arrived.scales is None else lay_out(arrived.scales, routing, rows, clear=clear)
    handle = PortableHandle(arrived.way, tokens, arrived.x.shape[0], routing.slots, arrived.weights)
    if masked:
        x = x.view(local, expert_rows, x.shape[1])
        scales = None if scales is None else scales.view(local, expert_rows, scales.shape[1])
    return ExpertBatch(layout, x, routing.counts, None if masked else routing.starts, None, None, scales, handle)


def _expert_major_rows(routing: Routing, ids: Tensor, local: int, alignment: int) -> int:
    if capturing(ids):
        return ids.numel() + local * (alignment - 1)
    return int(routing.starts[-1])
