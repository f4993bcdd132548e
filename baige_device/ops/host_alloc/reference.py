"""Reference of `host_alloc`: pageable memory of the process, for devices that are the CPU itself."""

from __future__ import annotations

import mmap

import torch

from baige_device.errors import HostMemoryError
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.ops.host_alloc.limits import check_host_memory

__all__ = ["host_alloc"]


def host_alloc(num_bytes: int) -> HostBuffer:
    """See the contract. An anonymous private mapping: zero-filled, page-aligned, of exactly this size.

    `close` gives the pages back at once; the address range itself goes when the last view of the tensor dies.
    """
    if num_bytes == 0:
        return HostBuffer(torch.empty(0, dtype=torch.uint8), "pageable")
    check_host_memory("host_alloc", num_bytes)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"host_alloc: num_bytes: asked for {num_bytes} bytes, and the kernel refused ({error}); check "
            "`ulimit -v` and vm.overcommit_memory, or ask for less"
        ) from error
    owned = [mapping]

    def release() -> None:
        owned.pop().madvise(mmap.MADV_DONTNEED)

    return HostBuffer(torch.frombuffer(mapping, dtype=torch.uint8), "pageable", release)
