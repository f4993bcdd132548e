"""Contract of `uva_sparse_gather`, and the row addressing that gather and scatter share."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import (
    INDEX_DTYPES,
    Cost,
    OpContract,
    check_distinct,
    check_dtype,
    check_index_values,
    check_inner_contiguous,
    check_number,
    check_same_device,
    check_shape,
)

__all__ = ["CONTRACT", "check_copy", "num_rows", "offset_rows", "row_bytes", "uva_sparse_gather"]

_OP = "uva_sparse_gather"


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
    """Copy rows `src[src_rows[i]]` of a host pool to rows `dst[dst_rows[i]]` of a device pool.

    Pools are `[S, W]`, or paged `[P, N, W]` where row id = page * N + offset; outer strides are free, the row itself is
    dense. Rows are copied as bytes, exactly, for any width. The plan may be flat or one list per request:

    Args:
        src: host pool, from `host_alloc` (or registered by the engine).
        dst: device pool, same dtype and W as `src`. Rows that no entry names keep their content.
        src_rows: int32 or int64 `[N]` or `[B, M]` on the device of `dst`. -1 reads nothing; its destination row becomes
            zeros.
        dst_rows: like `src_rows`. -1 skips the entry. A destination row must not appear twice before the counts, in one
            list or in two, after `dst_offsets`.
        count: int32 `[1]` for flat plans, `[B]` for plans by request, on the device: entries at and after the count are
            ignored and never read. None means all entries. The host never reads it, so graphs can be replayed with
            other counts.
        dst_offsets: int32 or int64 `[1]` for flat plans, `[B]` for plans by request, on the device: added to every
            destination of the list, so that a plan may name slots local to its request (`hot_cache_resolve`). -1 stays
            -1. None adds nothing.
        max_sms: upper bound on the cores used; 0 leaves it to the backend.
    Raises:
        ContractError: shapes, dtypes, strides or devices differ; with checked values, a row id outside the pool or a
            destination row named twice.
    Offsets are int64 from the first multiplication. Entries are visited in order, so sort or group them by locality.
    Cost: each copied row crosses the host link once. Queued on the current stream; no host synchronisation.
    """


def num_rows(pool: Tensor) -> int:
    """Rows of a `[S, W]` or `[P, N, W]` pool."""
    return pool.shape[0] if pool.dim() == 2 else pool.shape[0] * pool.shape[1]


def row_bytes(pool: Tensor) -> int:
    """Bytes of one row."""
    return pool.shape[-1] * pool.element_size()


def offset_rows(dst_rows: Tensor, dst_offsets: Tensor | None) -> Tensor:
    """The rows of `dst` that a plan names: int64 `dst_rows + dst_offsets` of its list, -1 where `dst_rows` is -1."""
    if dst_offsets is None:
        return dst_rows
    offsets = dst_offsets.long()
    return torch.where(dst_rows < 0, -1, dst_rows.long() + (offsets.unsqueeze(1) if dst_rows.dim() == 2 else offsets))


def check_copy(
    op: str,
    values: bool,
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None,
    dst_offsets: Tensor | None = None,
    *,
    minus_writes: bool,
) -> None:
    """The checks that gather and scatter share; `minus_writes` says whether a -1 of the sources writes its row."""
    for name, pool in (("src", src), ("dst", dst)):
        if pool.dim() not in (2, 3):
            raise ContractError(op, f"{name}.shape", "[S, W] or [P, N, W]", str(list(pool.shape)))
        check_inner_contiguous(op, name, pool)
    if dst.shape[-1] != src.shape[-1]:
        raise ContractError(op, "dst.shape[-1]", f"{src.shape[-1]} (as src)", str(dst.shape[-1]))
    check_dtype(op, "dst", dst, (src.dtype,))
    _check_plan(op, src_rows, dst_rows, count, dst_offsets)
    if values:
        live = _live(src_rows, count)
        check_index_values(op, "src_rows", torch.where(live, src_rows, -1), num_rows(src))
        named = torch.where(live, dst_rows, -1)
        check_index_values(op, "dst_rows", named, num_rows(dst))
        rows = offset_rows(named, dst_offsets)
        if dst_offsets is not None:
            _check_offset_rows(op, named, rows, num_rows(dst))
        check_distinct(op, "dst_rows", rows if minus_writes else torch.where(src_rows < 0, -1, rows))


def _check_plan(op: str, src_rows: Tensor, dst_rows: Tensor, count: Tensor | None, dst_offsets: Tensor | None) -> None:
    check_dtype(op, "src_rows", src_rows, INDEX_DTYPES)
    check_dtype(op, "dst_rows", dst_rows, INDEX_DTYPES)
    if src_rows.dim() not in (1, 2):
        raise ContractError(op, "src_rows.shape", "[N] or [B, M]", str(list(src_rows.shape)))
    check_shape(op, "dst_rows", dst_rows, tuple(src_rows.shape))
    lists = 1 if src_rows.dim() == 1 else src_rows.shape[0]
    if count is not None:
        check_dtype(op, "count", count, (torch.int32,))
        check_shape(op, "count", count, (lists,))
    if dst_offsets is not None:
        check_dtype(op, "dst_offsets", dst_offsets, INDEX_DTYPES)
        check_shape(op, "dst_offsets", dst_offsets, (lists,))
    check_same_device(op, src_rows=src_rows, dst_rows=dst_rows, count=count, dst_offsets=dst_offsets)


def _check_offset_rows(op: str, dst_rows: Tensor, rows: Tensor, size: int) -> None:
    bad = (dst_rows >= 0) & ((rows < 0) | (rows >= size))
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        wanted, got = f"dst_rows{where} + offset in [0, {size})", str(int(rows[tuple(where)].item()))
        raise ContractError(op, f"dst_offsets[{where[0] if rows.dim() == 2 else 0}]", wanted, got)


def _live(rows: Tensor, count: Tensor | None) -> Tensor:
    if count is None:
        return torch.ones_like(rows, dtype=torch.bool)
    positions = torch.arange(rows.shape[-1], device=rows.device)
    return positions < (count.unsqueeze(1) if rows.dim() == 2 else count)


def check(
    values: bool,
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    dst_offsets: Tensor | None = None,
    max_sms: int = 0,
) -> None:
    check_copy(_OP, values, src, dst, src_rows, dst_rows, count, dst_offsets, minus_writes=True)
    check_same_device(_OP, dst=dst, dst_rows=dst_rows)
    check_number(_OP, "max_sms", max_sms, 0)


def cost(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    dst_offsets: Tensor | None = None,
    max_sms: int = 0,
) -> Cost:
    """Bytes over the host link when every entry is valid."""
    return Cost(src_rows.numel() * row_bytes(src))


CONTRACT = OpContract(
    _OP,
    "gather",
    uva_sparse_gather,
    check,
    cost,
    "uva_sparse_gather(Tensor src, Tensor(a!) dst, Tensor src_rows, Tensor dst_rows, Tensor? count=None, *, "
    "Tensor? dst_offsets=None, int max_sms=0) -> ()",
)
