"""Gather and scatter through pinned staging memory: host row copies, one bulk transfer, a device scatter.

Correct on every build, since it needs no vendor op. It reads the plan on the host, so each call synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, rows
from baige_device.backends.kunlun.plan import HostPlan, on_host
from baige_device.ops.uva_sparse_gather.contract import offset_rows

__all__ = ["fetch", "store", "uva_sparse_gather", "uva_sparse_scatter"]


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
    """See the contract; synchronises once to read the plan. `max_sms` has no meaning here."""
    fetch(src, dst, on_host(src_rows, offset_rows(dst_rows, dst_offsets), count))


def uva_sparse_scatter(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    """See the contract; synchronises to read plan and rows, so the host may read `dst` at once. `max_sms` is unused."""
    source, target = on_host(src_rows, dst_rows, count)
    keep = source >= 0
    store(src, dst, (source[keep], target[keep]))


def fetch(src: Tensor, dst: Tensor, plan: HostPlan) -> None:
    """Host rows to device rows; a source of -1 gives zeros. Rows travel as bytes."""
    source, target = plan
    if source.numel() == 0:
        return
    pool, keep = rows.as_bytes(src), source >= 0
    staging = _staging(source.numel(), pool.shape[-1], dst.device)
    staging[keep] = rows.take_rows(rows.paged(pool, 1), source[keep])
    staged = staging.to(dst.device, non_blocking=True)
    rows.put_rows(rows.paged(rows.as_bytes(dst), 1), normalise.int64(target.to(dst.device)), staged)


def store(src: Tensor, dst: Tensor, plan: HostPlan) -> None:
    """Device rows to host rows; both lists name rows. Returns when the host rows are written."""
    source, target = plan
    if source.numel() == 0:
        return
    moved = rows.take_rows(rows.paged(rows.as_bytes(src), 1), normalise.int64(source.to(src.device)))
    rows.put_rows(rows.paged(rows.as_bytes(dst), 1), target, normalise.host_copy(moved))


def _staging(count: int, width: int, device: torch.device) -> Tensor:
    """Zeroed staging rows. torch's caching host allocator keeps them until the copy that reads them has run."""
    return torch.zeros(count, width, dtype=torch.uint8, pin_memory=device.type != "cpu")
