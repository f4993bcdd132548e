"""Large host pools with the same random bytes, shared by the benchmarks of a process: managed, and registered.

Ours get managed memory, as `host_alloc` gives it; the engines' kernels registered memory, as the engines make it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baige_device.backends.cuda import host_memory, managed_memory
from baige_device.ops.host_alloc.contract import HostBuffer

__all__ = ["host_rows"]

POOL_BYTES = 17 << 30


@functools.lru_cache(maxsize=2)
def _buffer(registered: bool) -> HostBuffer:
    buffer = (host_memory if registered else managed_memory).host_alloc(POOL_BYTES)
    noise = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).cuda()
    for piece in buffer.tensor.split(noise.numel()):
        piece.copy_(noise[: piece.numel()], non_blocking=True)
        noise = noise.roll(4099)
    torch.cuda.synchronize()
    return buffer


def host_rows(rows: int, row_bytes: int, *, registered: bool = False) -> Tensor:
    """uint8 `[rows, row_bytes]` of the pool."""
    return _buffer(registered).tensor[: rows * row_bytes].view(rows, row_bytes)
