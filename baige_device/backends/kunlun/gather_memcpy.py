"""Gather and scatter through `batch_memcpy`: one (source, destination, size) triple an entry, tables on the device.

Entries that move nothing get size 0, so the count stays on the device and no host link time is wasted on padding. That
the kernel accepts registered host addresses is not documented: the self-test `host_pointer_copy` decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, rows, vendor
from baige_device.backends.kunlun.plan import live_rows
from baige_device.ops.uva_sparse_gather.contract import offset_rows, row_bytes

__all__ = ["uva_sparse_gather", "uva_sparse_scatter"]


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
    """See the contract. Any strides; no host synchronisation. `max_sms` has no counterpart and is not used."""
    source, target = live_rows(src_rows, offset_rows(dst_rows, dst_offsets), count)
    _copy(src, dst, source, target)
    empty = torch.where(source < 0, target, -1)
    pool = rows.paged(rows.as_bytes(dst), 1)
    rows.put_rows(pool, empty, pool.new_zeros(1, pool.shape[-1]).expand(empty.shape[0], -1))


def uva_sparse_scatter(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    """See the contract. Any strides; no host synchronisation. `max_sms` has no counterpart and is not used."""
    _copy(src, dst, *live_rows(src_rows, dst_rows, count))


def _copy(src: Tensor, dst: Tensor, source: Tensor, target: Tensor) -> None:
    if source.numel() == 0 or row_bytes(src) == 0:
        return
    sizes = torch.where((source >= 0) & (target >= 0), row_bytes(src), 0)
    vendor.speed_ops().batch_memcpy(_addresses(src, source), _addresses(dst, target), normalise.int32(sizes))


def _addresses(pool: Tensor, index: Tensor) -> Tensor:
    """int64 addresses of rows; the address of row 0 for -1, whose size is 0."""
    wide = index.clamp(min=0)
    width = pool.element_size()
    if pool.dim() == 2:
        return pool.data_ptr() + wide * (pool.stride(0) * width)
    page_tokens = pool.shape[1]
    page, offset = wide // page_tokens, wide % page_tokens
    return pool.data_ptr() + page * (pool.stride(0) * width) + offset * (pool.stride(1) * width)
