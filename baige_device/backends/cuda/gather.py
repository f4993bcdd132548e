"""`uva_sparse_gather` and `uva_sparse_scatter` on CUDA: a few multiprocessors read or write host memory directly."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baige_device.backends.cuda.driver import Kernel, context, device_address, kernel
from baige_device.backends.cuda.managed_memory import has_large_pages
from baige_device.errors import ContractError
from baige_device.ops.uva_sparse_gather.contract import row_bytes

__all__ = ["default_sms", "uva_sparse_gather", "uva_sparse_scatter"]

_THREADS = 1024
_LARGE_POOL_BYTES = 8 << 30
_MOST_BLOCKS_OF_A_CLUSTER = 8
_INDEX_TYPES = {torch.int32: "int", torch.int64: "long long"}


def default_sms(bound_by_pages: bool) -> int:
    """Blocks used when the caller sets no bound.

    Eight have enough bytes in flight for the link. Where address translation bounds the link instead fewer are faster:
    what is in flight decides how many pages are live.
    """
    return 5 if bound_by_pages else 8


def _in_one_cluster(blocks: int, bound_by_pages: bool, max_sms: int) -> bool:
    """Whether all blocks are placed in one graphics processing cluster (GPC).

    Where address translation bounds the copy that is faster: the multiprocessors of a GPC seem to share translations.
    With a bound of the caller, who has other work beside the copy, blocks go wherever there is room: a GPC with enough
    free multiprocessors may be long in coming.
    """
    return max_sms == 0 and bound_by_pages and blocks <= _MOST_BLOCKS_OF_A_CLUSTER


def _bound_by_pages(pool: _Pool, num_bytes: int) -> bool:
    """Whether a host pool has more pages than the device's caches of translations hold."""
    return num_bytes >= _LARGE_POOL_BYTES and not has_large_pages(pool.base)


class _Pool(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64)] + [
        (name, ctypes.c_int64) for name in ("page_stride", "row_stride", "page_rows")
    ]


class _Params(ctypes.Structure):
    _fields_ = (
        [("src", _Pool), ("dst", _Pool)]
        + [(name, ctypes.c_uint64) for name in ("src_rows", "dst_rows", "dst_offsets")]
        + [(name, ctypes.c_int64) for name in ("src_outer", "src_inner", "dst_outer", "dst_inner")]
        + [("count", ctypes.c_uint64)]
        + [(name, ctypes.c_int64) for name in ("requests", "entries", "row_bytes")]
    )


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
    """See the contract. `src` may also be a device tensor that views host memory."""
    _copy("uva_sparse_gather", src, dst, src_rows, dst_rows, count, dst_offsets, max_sms, scatter=0)


def uva_sparse_scatter(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    """See the contract. `dst` may also be a device tensor that views host memory."""
    _copy("uva_sparse_scatter", src, dst, src_rows, dst_rows, count, None, max_sms, scatter=1)


def _copy(
    op: str,
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None,
    dst_offsets: Tensor | None,
    max_sms: int,
    scatter: int,
) -> None:
    width = row_bytes(src)
    if src_rows.numel() == 0 or width == 0:
        return
    device = src_rows.device.index
    with context(device):
        params = _Params()
        params.src = _pool(op, "src", src)
        params.dst = _pool(op, "dst", dst)
        flat = src_rows.dim() == 1
        params.src_rows, params.dst_rows = src_rows.data_ptr(), dst_rows.data_ptr()
        params.src_outer, params.src_inner = 0 if flat else src_rows.stride(0), src_rows.stride(-1)
        params.dst_outer, params.dst_inner = 0 if flat else dst_rows.stride(0), dst_rows.stride(-1)
        if count is not None:
            count = count.contiguous()
            params.count = count.data_ptr()
        if dst_offsets is not None:
            dst_offsets = dst_offsets.contiguous()
            params.dst_offsets = dst_offsets.data_ptr()
        params.requests = 1 if flat else src_rows.shape[0]
        params.entries = src_rows.shape[-1]
        params.row_bytes = width
        offset_dtype = torch.int32 if dst_offsets is None else dst_offsets.dtype
        function = _function(device, _unit(params), width, src_rows.dtype, dst_rows.dtype, offset_dtype, scatter)
        host, host_pool = (params.dst, dst) if scatter else (params.src, src)
        by_pages = _bound_by_pages(host, _pool_bytes(host_pool))
        blocks = min(max_sms or default_sms(by_pages), -(-src_rows.numel() * 32 // _THREADS))
        stream = torch._C._cuda_getCurrentRawStream(device)
        together = not scatter and _in_one_cluster(blocks, by_pages, max_sms)
        function.launch(blocks, _THREADS, stream, params, one_cluster=together)


def _pool(op: str, argument: str, pool: Tensor) -> _Pool:
    size = pool.element_size()
    base = pool.data_ptr()
    if pool.device.type == "cpu" and pool.numel() > 0:
        base = _mapped(op, argument, pool, base, size)
    if pool.dim() == 2:
        return _Pool(base, 0, pool.stride(0) * size, 0)
    return _Pool(base, pool.stride(0) * size, pool.stride(1) * size, pool.shape[1])


def _pool_bytes(pool: Tensor) -> int:
    return pool.element_size() * pool.shape[0] * pool.stride(0)


def _mapped(op: str, argument: str, pool: Tensor, base: int, size: int) -> int:
    """The pool's address for the device; its first and last byte must be registered, and mapped alike."""
    last = size - 1 + size * sum((n - 1) * stride for n, stride in zip(pool.shape, pool.stride(), strict=True))
    first_address, last_address = device_address(base), device_address(base + last)
    if first_address is None or last_address is None or last_address - first_address != last:
        raise ContractError(
            op, argument, "host memory from host_alloc (or registered with CUDA)", f"unregistered memory at {base:#x}"
        )
    return first_address


def _unit(params: _Params) -> int:
    """The widest access in bytes that divides every base address and stride of both pools."""
    bits = 16
    for pool in (params.src, params.dst):
        bits |= pool.base | pool.page_stride | pool.row_stride
    return min(16, bits & -bits)


@functools.lru_cache(maxsize=256)
def _function(
    device: int,
    unit: int,
    width: int,
    src_index: torch.dtype,
    dst_index: torch.dtype,
    offset_index: torch.dtype,
    scatter: int,
) -> Kernel:
    line = min(128, 32 * unit)
    # Lanes start at a line of the host row, so a row spans up to one line more than its width.
    loads = -(-(width + line - unit) // (32 * unit))
    macros: dict[str, str | int] = {
        "UNIT": unit,
        "LOADS": min(loads, 4),
        "ROWS": 1,
        "THREADS": _THREADS,
        "SRC_INDEX": _INDEX_TYPES[src_index],
        "DST_INDEX": _INDEX_TYPES[dst_index],
        "OFFSET_INDEX": _INDEX_TYPES[offset_index],
        "SCATTER": scatter,
    }
    return kernel(device, "copy_rows.cu", "copy_rows", macros)
