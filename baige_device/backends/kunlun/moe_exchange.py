"""How rows travel between the ranks of a group: `all_to_all_single`, or all_gather and reduce_scatter.

The rule, the same on every rank because a group's backend is: `all_to_all_single` where the backend is known to have
it, and all_gather of all rows with reduce_scatter of all sums elsewhere. Nothing is tried and caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.exchange import agree, exchange_rows, join_columns, split_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALL_TO_ALL_BACKENDS", "AllGather", "AllToAll", "Arrived", "Route", "group_backend", "reason", "send"]

_OP = "moe_dispatch"
ALL_TO_ALL_BACKENDS = ("nccl", "bkcl", "xccl", "gloo", "ucc", "mpi")
"""Backends of torch.distributed whose `all_to_all_single` takes uneven splits. BKCL's own primitives include it."""


class Route(Protocol):
    """How the rows of one dispatch came here."""

    def bring_home(self, rows: Tensor) -> Tensor:
        """`[R, H]` in order of arrival -> `[T, H]` of the same dtype: sums over ranks in fp32, 0 without any rank."""


@dataclass(frozen=True)
class Arrived:
    """Rows for this rank, one a (token, rank), in the order (source rank, token). `ids` are global."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class AllToAll:
    """One row a (token, rank) crosses the link, each way."""

    group: ProcessGroup | None
    tokens: int
    sent: Tensor
    """int64: the token of each row that this rank sent, ordered by (destination, token)."""
    sends: list[int]
    receives: list[int]

    @classmethod
    def plan(cls, ids: Tensor, local: int, capacity: int, group: ProcessGroup | None) -> AllToAll:
        """Work out the splits and tell all ranks; two syncs. Raises CapacityError on every rank alike."""
        size = group_rank_and_size(group)[1]
        owners = torch.where(ids >= 0, torch.div(ids, local, rounding_mode="floor"), -1)
        wanted = (owners.unsqueeze(0) == torch.arange(size, device=ids.device).view(-1, 1, 1)).any(2)
        sends: list[int] = normalise.host_copy(wanted.sum(1)).tolist()
        receives = agree(_OP, ids.shape[0], capacity, sends, group, ids.device)
        return cls(group, ids.shape[0], wanted.nonzero()[:, 1], sends, receives)

    def carry(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """The columns' rows to the ranks that want them."""
        packed = join_columns(columns)[self.sent]
        return split_columns(exchange_rows(packed, self.sends, self.receives, self.group), columns)

    def bring_home(self, rows: Tensor) -> Tensor:
        home = exchange_rows(rows, self.receives, self.sends, self.group)
        total = torch.zeros(self.tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        return total.index_add_(0, self.sent, home.float()).to(rows.dtype)


@dataclass(frozen=True)
class AllGather:
    """Every row goes to every rank, and every rank's fp32 sums come back: N times the bytes of `AllToAll`."""

    group: ProcessGroup | None
    tokens: int
    slots: int
    """Rows in the buffer of each rank: the largest token count of any rank."""
    kept: Tensor
    """int64 `[R]`: the row of the gathered buffer `[N * slots]` of each row that is for this rank."""

    @classmethod
    def carry(
        cls, columns: Sequence[Tensor], local: int, capacity: int, group: ProcessGroup | None
    ) -> tuple[AllGather, list[Tensor]]:
        """Gather the columns of all ranks and keep the rows of this rank's experts. The first column is the ids."""
        import torch.distributed as dist

        rank, size = group_rank_and_size(group)
        tokens, device = columns[0].shape[0], columns[0].device
        slots = max(agree(_OP, tokens, capacity, [tokens] * size, group, device))
        # Bytes of 255 make the ids of padding rows -1.
        packed = torch.nn.functional.pad(join_columns(columns), (0, 0, 0, slots - tokens), value=255)
        gathered = packed.new_empty(size * slots, packed.shape[1])
        if slots:
            dist.all_gather_into_tensor(gathered.view(-1), packed.view(-1), group=group)
        ids = split_columns(gathered, columns[:1])[0]
        here = (ids >= 0) & (torch.div(ids, local, rounding_mode="floor") == rank)
        kept = here.any(1).nonzero()[:, 0]
        return cls(group, tokens, slots, kept), split_columns(gathered[kept], columns)

    def bring_home(self, rows: Tensor) -> Tensor:
        import torch.distributed as dist

        size = group_rank_and_size(self.group)[1]
        total = normalise.zeros((size * self.slots, rows.shape[1]), torch.float32, rows.device)
        total.index_copy_(0, self.kept, rows.float())
        home = total.new_empty(self.slots, rows.shape[1])
        if self.slots:
            dist.reduce_scatter_tensor(home, total, group=self.group)
        return home[: self.tokens].to(rows.dtype)


def send(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    local: int,
    capacity: int,
    group: ProcessGroup | None,
) -> tuple[Route, Arrived]:
    """Send each row to the ranks of its experts (`local` a rank), on the group's transport. A collective."""
    columns = [ids, weights, x] if scales is None else [ids, weights, x, scales]
    route: Route
    if group_rank_and_size(group)[1] == 1 or _has_all_to_all(group_backend(group, x.device)):
        route = AllToAll.plan(ids, local, capacity, group)
        parts = route.carry(columns)
    else:
        route, parts = AllGather.carry(columns, local, capacity, group)
    ids_in, weights_in, x_in, *rest = parts
    return route, Arrived(x_in, ids_in, weights_in, rest[0] if rest else None)


def group_backend(group: ProcessGroup | None, device: torch.device) -> str:
    """The name of the group's backend for tensors on `device`: `nccl`, or from `cpu:gloo,cuda:nccl`."""
    import torch.distributed as dist

    name = str(dist.get_backend(group)).lower()
    by_device = dict(part.split(":", 1) for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name)


def _has_all_to_all(backend: str) -> bool:
    return backend in ALL_TO_ALL_BACKENDS


def reason(backend: str) -> str:
    """Which transport a group of this backend takes, and why; for `doctor`."""
    known = ", ".join(ALL_TO_ALL_BACKENDS)
    if _has_all_to_all(backend):
        return f"all_to_all_single: a group's backend {backend!r} is one of {known}"
    return f"all_gather and reduce_scatter: a group's backend {backend!r} is none of {known}"
