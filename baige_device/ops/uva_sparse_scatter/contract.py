"""Contract of `uva_sparse_scatter`."""

from __future__ import annotations

from torch import Tensor

from baige_device.ops.base import Cost, OpContract, check_number, check_same_device
from baige_device.ops.uva_sparse_gather.contract import check_copy, row_bytes

__all__ = ["CONTRACT", "uva_sparse_scatter"]

_OP = "uva_sparse_scatter"


def uva_sparse_scatter(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    """Copy rows `src[src_rows[i]]` of a device pool to rows `dst[dst_rows[i]]` of a host pool (KV backup).

    The mirror image of `uva_sparse_gather`: same pools `[S, W]` or `[P, N, W]`, same plan shapes, same device-resident
    `count`. One difference: -1 in either list skips the entry, since a backup must never overwrite a row with zeros.

    Args:
        src: device pool. dst: host pool from `host_alloc`, same dtype and W. Rows that no entry names stay.
        src_rows, dst_rows: int32 or int64 `[N]` or `[B, M]` on the device of `src`. A destination row must not appear
            twice among the entries that copy, in one list or in two; what a skipped entry names does not count.
        count: int32 `[1]` or `[B]` on the device, or None for all entries.
        max_sms: upper bound on the cores used; 0 leaves it to the backend.
    Raises:
        ContractError: shapes, dtypes, strides or devices differ; with checked values, a row id outside the pool or a
            destination row named twice.
    Cost: each copied row crosses the host link once. Queued on the current stream: the host may read the rows only
    after that stream has been synchronised.
    """


def check(
    values: bool,
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    check_copy(_OP, values, src, dst, src_rows, dst_rows, count, minus_writes=False)
    check_same_device(_OP, src=src, src_rows=src_rows)
    check_number(_OP, "max_sms", max_sms, 0)


def cost(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> Cost:
    """Bytes over the host link when every entry is valid."""
    return Cost(src_rows.numel() * row_bytes(src))


CONTRACT = OpContract(
    _OP,
    "gather",
    uva_sparse_scatter,
    check,
    cost,
    "uva_sparse_scatter(Tensor src, Tensor(a!) dst, Tensor src_rows, Tensor dst_rows, Tensor? count=None, *, "
    "int max_sms=0) -> ()",
)
