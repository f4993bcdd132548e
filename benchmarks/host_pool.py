"""One large host pool with random rows, shared by the gather benchmarks of a process."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baige_device.backends.cuda.host_memory import host_alloc
from baige_device.ops.host_alloc.contract import HostBuffer

__all__ = ["host_rows"]

POOL_BYTES = 17 << 30


@functools.lru_cache(maxsize=1)
def _buffer() -> HostBuffer:
    buffer = host_alloc(POOL_BYTES)
    noise = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device="cuda")
    for piece in buffer.tensor.split(noise.numel()):
        piece.copy_(noise[: piece.numel()], non_blocking=True)
        noise = noise.roll(4099)
    torch.cuda.synchronize()
    return buffer


def host_rows(rows: int, row_bytes: int) -> Tensor:
    """uint8 `[rows, row_bytes]` of the pool."""
    return _buffer().tensor[: rows * row_bytes].view(rows, row_bytes)
