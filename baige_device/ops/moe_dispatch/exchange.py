"""Moving rows between the ranks of a group, for the MoE reference: counts first, then the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.errors import CapacityError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["agree", "exchange_rows", "join_columns", "split_columns"]


def agree(
    op: str, tokens: int, capacity: int, sends: Sequence[int], group: ProcessGroup | None, device: torch.device
) -> list[int]:
    """Tell every rank this rank's token count, capacity and rows for each rank; return the rows each rank sends here.

    Raises:
        CapacityError: on every rank alike, when capacities differ or a rank has more tokens than the capacity.
    """
    size = len(sends)
    if size == 1:
        _check_capacity(op, [tokens], [capacity])
        return list(sends)
    import torch.distributed as dist

    mine = torch.tensor([tokens, capacity, *sends], dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine, group=group)
    table: list[list[int]] = torch.stack(rows).tolist()
    _check_capacity(op, [row[0] for row in table], [row[1] for row in table])
    rank = dist.get_rank(group)
    return [row[2 + rank] for row in table]


def exchange_rows(rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Send rows `[sum(sends), W]`, ordered by destination; return `[sum(receives), W]`, ordered by source.

    A collective. `all_to_all_single` with uneven splits is in every torch.distributed backend since 2.5, gloo too.
    """
    if len(sends) == 1:
        return rows
    import torch.distributed as dist

    received = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), list(receives), list(sends), group=group)
    return received


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Pack tensors `[R, W_i]` of any dtypes side by side as bytes `[R, sum of row bytes]`."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def split_columns(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `join_columns` for parts of the widths and dtypes of `like`."""
    parts, at = [], 0
    for part in like:
        width = part.shape[1] * part.element_size()
        # A copy, because a slice may start at an address that its dtype cannot have.
        parts.append(packed[:, at : at + width].clone(memory_format=torch.contiguous_format).view(part.dtype))
        at += width
    return parts


def _check_capacity(op: str, tokens: Sequence[int], capacities: Sequence[int]) -> None:
    for rank, capacity in enumerate(capacities):
        if capacity != capacities[0]:
            raise CapacityError(
                op, "max_tokens_per_rank", f"{capacities[0]} (as on rank 0) on all ranks", f"{capacity} on rank {rank}"
            )
    for rank, count in enumerate(tokens):
        if count > capacities[0]:
            raise CapacityError(
                op, "x.shape[0]", f"at most max_tokens_per_rank = {capacities[0]}", f"{count} tokens on rank {rank}"
            )
