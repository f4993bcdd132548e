"""How rows of `moe_dispatch` travel between the ranks of a group and back.

`all_to_all` sends one row a (token, rank that wants it); the row counts decide the sizes of the exchange, so every call
reads them on the host. `all_gather` sends every row to every rank, padded to `max_tokens_per_rank`; nothing is read on
the host, so it can be captured in a graph. Both bring back one partial sum a (token, rank), which is added up at home
in fp32, in rank order: a result does not depend on how a collective reduces.

The rule, alike on every rank: what `force_transport` says; `all_gather` while a graph is captured and where a rank
receives few bytes by it; else `all_to_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from baige_device.backends.portable.moe_routing import gather_sum, lay_out, route
from baige_device.errors import CapacityError
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.exchange import agree, exchange_rows, join_columns, split_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Arrived", "Name", "Way", "capturing", "force_transport", "owners", "send"]

_OP = "moe_dispatch"
Name = Literal["all_to_all", "all_gather"]

PAIR_GATHERS_UP_TO_BYTES = 56 << 20
"""Bytes that a rank of two receives at most by `all_gather` outside a graph: the most that were measured (two H200,
4096 rows of 14 KiB), still faster by a fifth. With two ranks most tokens have an expert on both."""

GROUP_GATHERS_UP_TO_BYTES = 8 << 20
"""The same for three ranks or more, whose gathered rows are in part not wanted. Not measured: what was saved between
two ranks, 0.35 ms or more, pays for this many unwanted bytes both ways on a link of 50 GB/s."""

_forced: dict[ProcessGroup | None, Name] = {}


class Way(Protocol):
    """How the rows of one dispatch came here."""

    def bring_home(self, rows: Tensor, out: Tensor) -> Tensor:
        """`rows [R, W]` in order of arrival, one partial sum each -> `out [T, W]`, 0 where no rank had a part."""


@dataclass(frozen=True)
class Arrived:
    """Rows on the rank of their experts, ordered by (source rank, token). `ids` are global."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None
    way: Way | None
    exact: bool
    """Whether every row has an expert here; else rows without one lie between."""


def force_transport(group: ProcessGroup | None, name: Name | None) -> None:
    """Fix the transport of a group, on all its ranks alike; for measurements. None goes back to the rule."""
    if name is None:
        _forced.pop(group, None)
    else:
        _forced[group] = name


def send(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    local: int,
    capacity: int,
    group: ProcessGroup | None,
) -> Arrived:
    """Send each row to the ranks of its experts (`local` a rank). A collective of two ranks or more.

    Raises:
        CapacityError: on every rank alike, unless a graph is captured: then on the rank that has too many tokens.
    """
    forced = _forced.get(group)
    if capturing(x) or forced == "all_gather" or (forced is None and _gathers(x, capacity, group)):
        return _all_gather(x, ids, weights, scales, capacity, group)
    return _all_to_all(x, ids, weights, scales, local, capacity, group)


def owners(topk_ids: Tensor, local: int, size: int) -> Tensor:
    """int32 `[T, N]`: n where some choice of the token lives on rank n, else -1."""
    ranks = torch.arange(size, device=topk_ids.device, dtype=torch.int32)
    owner = torch.where(topk_ids >= 0, topk_ids // local, -1)
    wanted = (owner.unsqueeze(2) == ranks).any(1)
    return torch.where(wanted, ranks, -1)


def _gathers(x: Tensor, capacity: int, group: ProcessGroup | None) -> bool:
    """Whether gathering is worth what it sends too much; known alike to all ranks."""
    size = group_rank_and_size(group)[1]
    received_bytes = (size - 1) * capacity * x.shape[1] * x.element_size()
    return received_bytes <= (PAIR_GATHERS_UP_TO_BYTES if size == 2 else GROUP_GATHERS_UP_TO_BYTES)


def capturing(tensor: Tensor) -> bool:
    """Whether a graph is being captured on the tensor's device."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class _AllToAll:
    group: ProcessGroup | None
    home: Tensor
    """int32 `[T, N]`: the row that token t sent to rank n, -1 for none."""
    sends: list[int]
    receives: list[int]

    def bring_home(self, rows: Tensor, out: Tensor) -> Tensor:
        return gather_sum(exchange_rows(rows, self.receives, self.sends, self.group), self.home, None, out)


@dataclass(frozen=True)
class _AllGather:
    group: ProcessGroup | None
    ranks: int
    slots: int
    """Rows that each rank brought, padding included."""

    def bring_home(self, rows: Tensor, out: Tensor) -> Tensor:
        even = [self.slots] * self.ranks
        home = exchange_rows(rows, even, even, self.group)
        token = torch.arange(out.shape[0], dtype=torch.int32, device=out.device).unsqueeze(1)
        first = torch.arange(self.ranks, dtype=torch.int32, device=out.device) * self.slots
        return gather_sum(home, token + first, None, out)


def _all_to_all(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    local: int,
    capacity: int,
    group: ProcessGroup | None,
) -> Arrived:
    """One row a (token, rank), payload and routing apart, so that the payload is packed in one pass."""
    size = group_rank_and_size(group)[1]
    routing = route(owners(ids, local, size), 0, size)
    sends: list[int] = routing.counts.tolist()
    receives = agree(_OP, x.shape[0], capacity, sends, group, x.device)
    columns = _routed(ids, weights, scales)
    payload = lay_out(x, routing, sum(sends), clear=False)
    routed = lay_out(join_columns(columns), routing, sum(sends), clear=False)
    x_in = exchange_rows(payload.view(torch.uint8), sends, receives, group).view(x.dtype)
    parts = split_columns(exchange_rows(routed, sends, receives, group), columns)
    way = _AllToAll(group, routing.slots, sends, receives)
    return Arrived(x_in, parts[0], parts[1], parts[2] if scales is not None else None, way, exact=True)


def _all_gather(
    x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None, capacity: int, group: ProcessGroup | None
) -> Arrived:
    """Every row to every rank, payload and routing apart, each padded to the same number of rows."""
    rank, size = group_rank_and_size(group)
    if not capturing(x):
        agree(_OP, x.shape[0], capacity, [x.shape[0]] * size, group, x.device)
    elif x.shape[0] > capacity:
        expected = f"at most max_tokens_per_rank = {capacity}"
        raise CapacityError(_OP, "x.shape[0]", expected, f"{x.shape[0]} tokens on rank {rank}")
    columns = _routed(ids, weights, scales)
    x_in = _gather_rows(x.contiguous().view(torch.uint8), capacity, size, group).view(x.dtype)
    parts = split_columns(_gather_rows(join_columns(columns), capacity, size, group), columns)
    scales_in = parts[2] if scales is not None else None
    return Arrived(x_in, parts[0], parts[1], scales_in, _AllGather(group, size, capacity), exact=False)


def _gather_rows(rows: Tensor, slots: int, size: int, group: ProcessGroup | None) -> Tensor:
    """`rows [T, W]` of bytes of all ranks, `[size * slots, W]`; bytes of 255 behind T make the ids of padding -1."""
    import torch.distributed as dist

    padded = rows
    if rows.shape[0] < slots:
        padded = rows.new_full((slots, rows.shape[1]), 255)
        padded[: rows.shape[0]].copy_(rows)
    gathered = rows.new_empty((size * slots, rows.shape[1]))
    if gathered.numel():
        dist.all_gather_into_tensor(gathered.view(-1), padded.view(-1), group=group)
    return gathered


def _routed(ids: Tensor, weights: Tensor, scales: Tensor | None) -> Sequence[Tensor]:
    return [ids.to(torch.int32), weights] if scales is None else [ids.to(torch.int32), weights, scales]
