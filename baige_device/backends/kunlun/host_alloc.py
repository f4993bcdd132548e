"""`host_alloc`: an anonymous mapping, registered with the vendor's runtime so that kernels can address it."""

from __future__ import annotations

import mmap
import resource

import torch
from torch import Tensor

from baige_device.backends.kunlun import vendor
from baige_device.backends.kunlun.limits import HOST_REGISTER_ALIGN
from baige_device.errors import HostMemoryError
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.ops.host_alloc.limits import check_host_memory

__all__ = ["host_alloc"]


def host_alloc(num_bytes: int) -> HostBuffer:
    """See the contract. Start and length of the registration are multiples of 2 MiB, the tensor has the exact size.

    Costs up to 4 MiB more than asked for, from the two alignments.
    """
    if num_bytes == 0:
        return HostBuffer(torch.empty(0, dtype=torch.uint8), "pinned")
    align = HOST_REGISTER_ALIGN.value
    length = -(-num_bytes // align) * align
    check_host_memory("host_alloc", length + align)
    memory = _map(length + align, num_bytes)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % align
    aligned = whole[offset : offset + length]
    _register(aligned, num_bytes)
    owned = [(memory, aligned.data_ptr())]

    def release() -> None:
        mapping, address = owned.pop()
        _unregister(mapping, address, num_bytes)
        mapping.madvise(mmap.MADV_DONTNEED)

    return HostBuffer(aligned[:num_bytes], "pinned", release)


_still_registered: list[mmap.mmap] = []
"""Memory that the runtime did not let go. The device may still write there, so it is never unmapped."""


def _map(length: int, asked: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"host_alloc: num_bytes: asked for {asked} bytes, and the kernel refused ({error}); check `ulimit -v` and "
            "vm.overcommit_memory, or ask for less"
        ) from error


def _register(memory: Tensor, asked: int) -> None:
    status = int(vendor.host_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        raise HostMemoryError(
            f"host_alloc: num_bytes: asked for {asked} bytes, and registering {memory.numel()} bytes with the Kunlun "
            f"runtime failed with status {status}; memlock limit: {limit} (raise it with `ulimit -l`, in a container "
            "with --ulimit memlock=-1)"
        )


def _unregister(mapping: mmap.mmap, address: int, asked: int) -> None:
    status = int(vendor.host_runtime().cudaHostUnregister(address))
    if status != 0:
        _still_registered.append(mapping)
        raise HostMemoryError(
            f"host_alloc: release of {asked} bytes: cudaHostUnregister({address:#x}) of the Kunlun runtime failed with "
            f"status {status}; the memory stays mapped, since the device may still reach it"
        )
