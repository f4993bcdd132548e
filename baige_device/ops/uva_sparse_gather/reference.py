"""Reference of `uva_sparse_gather`, and the row copies that gather and scatter share."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.uva_sparse_gather.contract import offset_rows

__all__ = ["copy_rows", "live_entries", "uva_sparse_gather", "write_rows"]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def uva_sparse_gather(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    dst_offsets: Tensor | None = None,
    max_sms: int = 0,
) -> None:
    """See the contract."""
    sources, targets = live_entries(src_rows, offset_rows(dst_rows, dst_offsets), count)
    named = sources >= 0
    copy_rows(src, dst, sources[named], targets[named])
    write_rows(dst, targets[~named], 0)


def live_entries(src_rows: Tensor, dst_rows: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """The plan's entries before the count whose destination is not -1, flat, int64."""
    live = dst_rows >= 0
    if count is not None:
        positions = torch.arange(dst_rows.shape[-1], device=dst_rows.device)
        live &= positions < (count.unsqueeze(1) if dst_rows.dim() == 2 else count)
    return src_rows[live].long(), dst_rows[live].long()


def copy_rows(src: Tensor, dst: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy rows of one pool to rows of another, bit by bit; the pools may live on different devices."""
    if sources.numel():
        rows = _as_integers(src)[_address(src, sources.to(src.device))]
        write_rows(dst, targets, rows.to(dst.device))


def write_rows(pool: Tensor, targets: Tensor, rows: Tensor | int) -> None:
    """Write integer-typed rows, or one number, to the named rows of a pool."""
    if targets.numel():
        _as_integers(pool)[_address(pool, targets.to(pool.device))] = rows


def _as_integers(pool: Tensor) -> Tensor:
    """The pool as integers of the same size: bits stay bits, and every dtype has the index kernels."""
    return pool.view(_SAME_SIZE[pool.element_size()])


def _address(pool: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    if pool.dim() == 2:
        return (rows,)
    return rows // pool.shape[1], rows % pool.shape[1]
