"""`host_alloc` on CUDA, tuned: managed memory that stays on the host, which the device maps by pages of 2 MiB.

Registered host memory, whatever pages the kernel backs it with, is mapped for the device by pages of 4 KiB: 34 MB of
page tables for 17 GB, more than the caches hold beside other work. The driver's managed memory (UVM) gives the device a
page of 2 MiB for each 2 MiB that the host has in one piece, so that scattered rows are read at the rate of the link,
however large the pool is. Figures in docs/cuda.md.

The price: the driver's own copies (`cudaMemcpyAsync`) to and from such memory run at a fifth of the link's rate. Rows
are to be moved by `uva_sparse_gather` and `uva_sparse_scatter`.
"""

from __future__ import annotations

import ctypes
import logging

import torch

from baige_device.backends.cuda import host_memory
from baige_device.backends.cuda.driver import (
    advise_on_host,
    alloc_managed,
    context,
    free_managed,
    managed_is_concurrent,
    map_managed,
    prefetch_to_host,
)
from baige_device.errors import BackendError
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.ops.host_alloc.limits import check_host_memory

__all__ = ["has_large_pages", "host_alloc"]

logger = logging.getLogger("baige_device")

_PAGE_BYTES = 2 << 20
_live: dict[int, int] = {}
"""Address and bytes of each buffer that is not closed."""


def has_large_pages(address: int) -> bool:
    """Whether the device maps this host address by large pages."""
    return any(0 <= address - start < length for start, length in list(_live.items()))


def host_alloc(num_bytes: int) -> HostBuffer:
    """See the contract. Where the device cannot have managed memory on the host, registered memory takes its place.

    It is mapped for the current device; another device reaches it by faulting each page once.
    """
    if num_bytes == 0:
        return host_memory.host_alloc(0)
    device = torch.cuda.current_device()
    if not managed_is_concurrent(device):
        logger.warning(
            "host_alloc: the driver has no concurrent managed access on device %d; registered memory takes its place",
            device,
        )
        return host_memory.host_alloc(num_bytes)
    length = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    check_host_memory("host_alloc", length)
    with context(device):
        try:
            address = _allocate(length, device)
        except BackendError as error:
            logger.warning("host_alloc: %s; registered memory takes its place, which large pools are slower in", error)
            return host_memory.host_alloc(num_bytes)
    _live[address] = length
    # The tensor's storage is exactly the buffer, so that strided views cannot reach the slack behind it.
    tensor = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)

    def release() -> None:
        del _live[address]
        with context(device):
            free_managed(address)

    return HostBuffer(tensor, "managed", release)


def _allocate(length: int, device: int) -> int:
    """Memory with every page on the host, zeroed, and mapped for the device; nothing is left behind by an error."""
    address = alloc_managed(length)
    try:
        advise_on_host(address, length)
        if not host_memory.populate(address, length):
            prefetch_to_host(address, length)  # half as fast
        map_managed(address, length, device)
    except BaseException:
        free_managed(address)
        raise
    return address
