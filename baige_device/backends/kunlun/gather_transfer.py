"""Gather and scatter through `transfer_kv_per_layer_mla`, the vendor's proven host transfer, with a row as its page.

The kernel copies every entry it is given, so the live entries are picked on the host: one sync a call. That a row
smaller than a KV page may be moved is not documented: the self-test `transfer_row_granularity` decides. Pools whose
rows are not evenly spaced by their own size go through pinned staging.
"""

from __future__ import annotations

from torch import Tensor

from baige_device.backends.kunlun import gather_staged, normalise, rows, vendor
from baige_device.backends.kunlun.plan import HostPlan, on_host
from baige_device.ops.uva_sparse_gather.contract import offset_rows, row_bytes

__all__ = ["row_step", "uva_sparse_gather", "uva_sparse_scatter"]


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
    """See the contract; synchronises once to read the plan. `max_sms` has no counterpart and is not used."""
    source, target = on_host(src_rows, offset_rows(dst_rows, dst_offsets), count)
    empty = normalise.int64(target[source < 0].to(dst.device))
    pool = rows.paged(rows.as_bytes(dst), 1)
    rows.put_rows(pool, empty, pool.new_zeros(empty.shape[0], pool.shape[-1]))
    plan = source[source >= 0], target[source >= 0]
    if not _transfer(src, dst, plan, dst):
        gather_staged.fetch(src, dst, plan)


def uva_sparse_scatter(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    """See the contract; synchronises once to read the plan. `max_sms` has no counterpart and is not used."""
    source, target = on_host(src_rows, dst_rows, count)
    plan = source[source >= 0], target[source >= 0]
    if not _transfer(src, dst, plan, src):
        gather_staged.store(src, dst, plan)


def row_step(pool: Tensor) -> int:
    """Distance of consecutive rows in rows, or 0 when the rows of the pool are not evenly spaced by their size."""
    if pool.dim() == 2:
        stride = pool.stride(0) if pool.shape[0] > 1 else pool.shape[1]
    else:
        stride = pool.stride(1) if pool.shape[1] > 1 else pool.stride(0)
        if pool.shape[0] > 1 and pool.stride(0) != stride * pool.shape[1]:
            return 0
    return stride // pool.shape[-1] if pool.shape[-1] and stride % pool.shape[-1] == 0 else 0


def _transfer(src: Tensor, dst: Tensor, plan: HostPlan, device_pool: Tensor) -> bool:
    """Run the vendor's transfer; False when the pools' strides do not fit it. Nothing to move counts as done."""
    source, target = plan
    if source.numel() == 0 or row_bytes(src) == 0:
        return True
    src_step, dst_step = row_step(src), row_step(dst)
    if src_step == 0 or dst_step == 0:
        return False
    device = device_pool.device
    vendor.speed_ops().transfer_kv_per_layer_mla(
        src,
        dst,
        normalise.int64(source * src_step).to(device),
        normalise.int64(target * dst_step).to(device),
        row_bytes(src),
    )
    return True
