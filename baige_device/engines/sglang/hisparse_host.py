"""HiSparse's host pool: memory from `host_alloc`, backups by `uva_sparse_scatter`, preloads by `uva_sparse_gather`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from baige_device.activation import current
from baige_device.engines.sglang.hisparse_rows import token_rows
from baige_device.engines.sglang.ledger import HISPARSE_MEMORY, LEDGER
from baige_device.errors import MountError
from baige_device.ops.host_alloc.contract import HostBuffer

__all__ = ["backup_all_layers", "destroy", "host_memory", "load_layer"]

_buffers: dict[int, HostBuffer] = {}
"""The memory of each live host pool of ours, by its address."""


@contextmanager
def host_memory(device_type: str, budget_bytes: int = 0) -> Iterator[None]:
    """Within the block SGLang's host pools get memory that the device addresses; `budget_bytes` 0 sets no limit.

    An exception in the block frees what it had got.
    """
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    LEDGER.note_seam(HISPARSE_MEMORY)
    before = dict(ALLOC_MEMORY_FUNCS)
    known = set(_buffers)
    ALLOC_MEMORY_FUNCS[device_type] = _allocator(budget_bytes)
    try:
        yield
    except BaseException:
        for address in set(_buffers) - known:
            _buffers.pop(address).close()
        raise
    finally:
        ALLOC_MEMORY_FUNCS.clear()
        ALLOC_MEMORY_FUNCS.update(before)


def backup_all_layers(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    io_backend: str,
) -> None:
    """Copy rows of every layer from the device pool to the host pool; other pools than ours go SGLang's way."""
    if not _is_ours(pool, io_backend):
        original(pool, device_pool, host_indices, device_indices, io_backend)
        return
    scatter = current().ops.uva_sparse_scatter
    for device, host in zip(pool.device_kv_buffers, pool.kv_buffer, strict=True):
        scatter(token_rows(device), token_rows(host), device_indices, host_indices)


def load_layer(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy rows of one layer from the host pool to the device pool; other pools than ours go SGLang's way."""
    if not _is_ours(pool, io_backend):
        original(pool, device_pool, host_indices, device_indices, layer_id, io_backend, is_draft=is_draft)
        return
    # HiSparse's pool has neither draft layers nor layers of other ranks: its layers are the device pool's.
    host, device = pool.kv_buffer[layer_id], pool.device_kv_buffers[layer_id]
    current().ops.uva_sparse_gather(token_rows(host), token_rows(device), host_indices, device_indices)


def destroy(original: Callable[..., None], pool: Any) -> None:
    """Free a pool of ours; SGLang has drained its transfers. A second call finds nothing, as upstream."""
    buffer = None if pool.kv_buffer is None else _buffers.pop(pool.kv_buffer.data_ptr(), None)
    if buffer is None:
        original(pool)
        return
    pool.pin_memory = False  # it is not registered by SGLang, which would unregister it
    original(pool)
    pool.data_refs = None
    buffer.close()


def _allocator(budget_bytes: int) -> Callable[..., Tensor]:
    def allocate(dims: tuple[int, ...], dtype: torch.dtype, **unused: Any) -> Tensor:
        num_bytes = math.prod(dims) * dtype.itemsize
        if 0 < budget_bytes < num_bytes:
            raise MountError(
                f"sglang: HiSparse: the host pool {list(dims)} of {dtype} takes {num_bytes} bytes on this rank, and "
                f"hisparse.host_gib_per_node leaves it {budget_bytes}; lower host_to_device_ratio in --hisparse-config "
                "or --max-total-tokens, or give more"
            )
        buffer = current().ops.host_alloc(num_bytes)
        _buffers[buffer.tensor.data_ptr()] = buffer
        return buffer.tensor.view(dtype).view(dims)

    return allocate


def _is_ours(pool: Any, io_backend: str) -> bool:
    if pool.kv_buffer is None or not isinstance(pool.kv_buffer, Tensor):
        return False
    if pool.kv_buffer.data_ptr() not in _buffers:
        return False
    if pool.layout != "layer_first" or io_backend != "kernel":
        raise MountError(
            f"sglang: HiSparse: expected a host pool layer_first and io backend kernel, got {pool.layout}, {io_backend}"
        )
    return True
