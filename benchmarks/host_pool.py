"""Large host pools with the same content, shared by the benchmarks of a process: managed, and registered.

Ours get managed memory, as `host_alloc` gives it; the engines' kernels registered memory, as the engines make it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baige_device.backends.cuda import host_memory, managed_memory
from baige_device.ops.host_alloc.contract import HostBuffer

__all__ = ["filled_buffer", "host_rows"]

POOL_BYTES = 17 << 30


def filled_buffer(pattern: Tensor, *, registered: bool) -> HostBuffer:
    """`POOL_BYTES` full of a device tensor's bytes, `[N]` or `[N, W]`, moved along by 4099 from copy to copy."""
    buffer = (host_memory if registered else managed_memory).host_alloc(POOL_BYTES)
    for piece in buffer.tensor.split(pattern.numel()):
        piece.copy_(pattern.flatten()[: piece.numel()], non_blocking=True)
        pattern = pattern.roll(4099, 0)
    torch.cuda.synchronize()
    return buffer


@functools.lru_cache(maxsize=1)
def _noise() -> Tensor:
    return torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device="cuda")


@functools.lru_cache(maxsize=2)
def _buffer(registered: bool) -> HostBuffer:
    return filled_buffer(_noise(), registered=registered)


def host_rows(rows: int, row_bytes: int, *, registered: bool = False) -> Tensor:
    """uint8 `[rows, row_bytes]` of the pool."""
    return _buffer(registered).tensor[: rows * row_bytes].view(rows, row_bytes)
