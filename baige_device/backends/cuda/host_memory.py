"""`host_alloc` on CUDA, portable: an anonymous mapping on huge pages, registered with the driver in bounded chunks.

`managed_memory.py` is faster for scattered rows of a large pool; this serves every driver, and the driver's own copies.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from baige_device.backends.cuda.driver import context, register_host, unregister_host
from baige_device.errors import HostMemoryError
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.ops.host_alloc.limits import check_host_memory, memlock_limit

__all__ = ["CHUNK_BYTES", "host_alloc", "populate"]

CHUNK_BYTES = 64 << 30
"""Largest single registration. The driver has limits of its own, and a copy may not span two registrations, so chunks
are as large as is safe."""

_HUGE_PAGE_BYTES = 2 << 20
_FAULT_BYTES = 256 << 20
_POPULATE_WRITE = 23


def host_alloc(num_bytes: int) -> HostBuffer:
    """See the contract. Whole 2 MiB spans lie on huge pages where the kernel has them; the rest on ordinary pages.

    The NVIDIA driver does not account pinned pages to RLIMIT_MEMLOCK, so that limit refuses nothing here; it is named
    when a registration fails.
    """
    if num_bytes == 0:
        return HostBuffer(torch.empty(0, dtype=torch.uint8), "pinned")
    check_host_memory("host_alloc", num_bytes)
    try:
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"host_alloc: num_bytes: asked for {num_bytes} bytes, and the kernel refused ({error}); check "
            "`ulimit -v` and vm.overcommit_memory, or ask for less"
        ) from error
    offset = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE_BYTES
    # The tensor's storage is exactly the buffer, so that strided views cannot reach the slack around it.
    tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=offset)
    address = tensor.data_ptr()
    _fault_in(address, num_bytes)
    device = torch.cuda.current_device()
    try:
        chunks = _register(address, num_bytes, device)
    except HostMemoryError:
        _give_back(mapping)
        raise

    def release() -> None:
        with context(device):
            for chunk in chunks:
                unregister_host(chunk)
        _give_back(mapping)

    return HostBuffer(tensor, "pinned", release)


def _give_back(mapping: mmap.mmap) -> None:
    """Free the pages now; the address range itself goes with the last view of the tensor."""
    mapping.madvise(mmap.MADV_DONTNEED)


def _fault_in(address: int, num_bytes: int) -> None:
    """Bring the pages in; registration alone would fault them one after the other."""
    huge_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if huge_bytes:
        # Advice only: a kernel without transparent huge pages refuses it, and ordinary pages serve as well.
        _libc().madvise(address, huge_bytes, mmap.MADV_HUGEPAGE)
    # Whatever it refuses is faulted, or complained about, by the registration.
    populate(address, num_bytes)


def populate(address: int, num_bytes: int) -> bool:
    """Bring pages in with several threads; whether the kernel has brought all (before 5.14 it cannot)."""
    libc = _libc()

    def fault(start: int) -> bool:
        refused: int = libc.madvise(address + start, min(_FAULT_BYTES, num_bytes - start), _POPULATE_WRITE)
        return refused == 0

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return all(list(pool.map(fault, range(0, num_bytes, _FAULT_BYTES))))


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _register(address: int, num_bytes: int, device: int) -> list[int]:
    """Register chunk by chunk; on a failure the chunks that are registered are undone before the error leaves."""
    done: list[int] = []
    with context(device):
        for start in range(0, num_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, num_bytes - start)
            complaint = register_host(address + start, length)
            if complaint:
                for chunk in done:
                    unregister_host(chunk)
                raise HostMemoryError(_explain(num_bytes, start, length, complaint))
            done.append(address + start)
    return done


def _explain(num_bytes: int, start: int, length: int, complaint: str) -> str:
    memlock = memlock_limit()
    locked = "unlimited" if memlock is None else f"{memlock.available_bytes} bytes"
    return (
        f"host_alloc: num_bytes: asked for {num_bytes} bytes; {start} bytes were pinned, and pinning {length} more "
        f"failed: {complaint}; RLIMIT_MEMLOCK is {locked}; ask for less, raise the container's memory limit, or run "
        "with `ulimit -l unlimited`"
    )
