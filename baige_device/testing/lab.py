"""The bench a case works at: the ops under test, the device, reproducible random data and guarded, poisoned buffers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.registry.table import OpTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GUARD", "POISON", "Lab", "poison_", "synchronize"]

GUARD = 64
"""Elements kept on both sides of every guarded buffer; nobody may write them."""

POISON: dict[torch.dtype, float] = {torch.int32: -7777, torch.int64: -7777, torch.int16: -777, torch.uint8: 165}
"""What integer outputs hold before a call; floating-point outputs hold NaN."""


def poison_(tensor: Tensor) -> Tensor:
    """Fill with values that no op may leave behind."""
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    return tensor.fill_(POISON.get(tensor.dtype, 77))


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on a device; a CPU device has no queue."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


class Lab:
    """Everything one case needs; made anew for every case from the base seed and the case's name."""

    def __init__(
        self,
        ops: OpTable,
        device: torch.device,
        seed: int,
        *,
        rank: int = 0,
        size: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        self.ops = ops
        self.device = device
        self.seed = seed
        self.forked = False
        """True for the later inputs of a graph or stream case: same shapes, other lengths."""
        self.rank = rank
        self.size = size
        self.group = group
        self.constants = random.Random(seed)
        """For numbers that forks must draw alike, since a captured graph keeps those of its first call."""
        self.random = random.Random(seed)
        self._first_seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._host: list[HostBuffer] = []

    def fork(self, salt: int) -> Lab:
        """A lab over the same ops with other random data."""
        other = Lab(
            self.ops, self.device, self.seed ^ (salt * 0x9E3779B1), rank=self.rank, size=self.size, group=self.group
        )
        other._first_seed = self._first_seed
        other.constants = random.Random(self._first_seed)
        other._host = self._host
        other.forked = True
        return other

    def generator(self, salt: int) -> torch.Generator:
        """A generator that is the same on all ranks, for data that every rank must be able to compute."""
        return torch.Generator().manual_seed(self.seed * 1000 + salt)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Unit-variance noise times `scale`, on the device."""
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform integers in `[low, high)`, on the device."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype).to(self.device)

    def permutation(self, size: int, count: int | None = None, *, dtype: torch.dtype = torch.int64) -> Tensor:
        """The first `count` of a random permutation of `range(size)`, on the device."""
        return torch.randperm(size, generator=self._generator)[:count].to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Python values as a tensor on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def out(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous output buffer full of poison, with guards on both sides in the same storage."""
        count = math.prod(shape)
        base = poison_(torch.empty(count + 2 * GUARD, dtype=dtype, device=self.device))
        return base[GUARD : GUARD + count].view(tuple(shape))

    def bytes_like(self, tensor: Tensor) -> Tensor:
        """Overwrite the whole storage behind a tensor with random bytes; returns the tensor."""
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage())
        raw.copy_(torch.randint(0, 256, (raw.numel(),), generator=self._generator, dtype=torch.uint8))
        return tensor

    def host_bytes(self, count: int) -> Tensor:
        """uint8 `[count]` of host memory that the device can reach, from the backend's own `host_alloc` if any."""
        if self.ops.serves("host_alloc"):
            # Through numpy the storage ends where the buffer ends, even if the backend cuts buffers out of an arena.
            buffer = self.ops.host_alloc(count)
            self._host.append(buffer)
            return torch.from_numpy(buffer.tensor.numpy())
        return torch.empty(count, dtype=torch.uint8, pin_memory=self.device.type != "cpu")

    def pause(self) -> None:
        """Sleep 0 to 20 ms, differently on every rank, so that ranks meet in every order."""
        if self.size > 1:
            time.sleep(random.Random(self.seed * 31 + self.rank).random() * 0.02)

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        synchronize(self.device)

    def close(self) -> None:
        """Give back the host memory that the case took."""
        for buffer in self._host:
            buffer.close()
        self._host.clear()
