"""Row addressing in flat or paged pools, and a scatter with static shapes that skips -1 without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_bytes", "paged", "put_rows", "take_rows"]


def as_bytes(pool: Tensor) -> Tensor:
    """The pool with rows of bytes, for exact moves of any dtype. A view: rows are dense."""
    return pool.view(torch.uint8)


def paged(pool: Tensor, row_dims: int) -> Tensor:
    """The pool as `[P, N, *row]`: a flat `[S, *row]` pool becomes pages of one row. A view."""
    return pool.unsqueeze(1) if pool.dim() == row_dims + 1 else pool


def take_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """`pool[row // N, row % N]` for a `[P, N, *row]` pool and any shape of non-negative rows."""
    wide = rows.to(torch.int64)
    if pool.shape[1] == 1:
        return pool.squeeze(1)[wide]
    return pool[wide // pool.shape[1], wide % pool.shape[1]]


def put_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write `values[i]` to row `rows[i]` of a `[P, N, *row]` pool; -1 writes nothing.

    Shapes do not depend on the data, so no sync happens and a graph may capture it: an entry that must not write
    repeats the write of the first live entry, or rewrites row 0 with itself when there is none.
    """
    if rows.numel() == 0 or pool.numel() == 0:
        return
    values = values.to(pool.dtype)  # first, since row 0 must survive its rewriting bit by bit
    live = rows >= 0
    first = live.to(torch.int32).argmax().reshape(1)
    any_live = live.any()
    wide = rows.to(torch.int64)
    spare_row = torch.where(any_live, wide.index_select(0, first), 0)
    spare = torch.where(any_live, values.index_select(0, first), pool[0, 0].unsqueeze(0))
    target = torch.where(live, wide, spare_row)
    shape = (-1,) + (1,) * (values.dim() - 1)
    pool.index_put_((target // pool.shape[1], target % pool.shape[1]), torch.where(live.view(shape), values, spare))
