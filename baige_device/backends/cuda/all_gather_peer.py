"""The transports that read peers' memory, put together: multiprocessors for small shards, copy engines for large."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.cuda.all_gather_choice import Name
from baige_device.backends.cuda.all_gather_copy import CopyEngine
from baige_device.backends.cuda.all_gather_kernel import ShardCopier
from baige_device.backends.cuda.all_gather_source import Sources
from baige_device.backends.cuda.all_gather_stream import InFlight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BySize", "PeerKernel"]

KERNEL_UP_TO_BYTES = 32 << 20
"""Largest shard that the multiprocessors pull; above, copy engines are as fast and leave the cores to others."""

_BYTES_A_BLOCK = 64 << 10
_MOST_BLOCKS = 16
"""Twice as many gain 1 % at most up to `KERNEL_UP_TO_BYTES`, and take the cores from a product beside them."""


def _blocks(largest_bytes: int) -> int:
    """Blocks on the link: enough bytes in flight to fill it, fewer where a shard is too small for them."""
    return max(1, min(_MOST_BLOCKS, largest_bytes // _BYTES_A_BLOCK))


class PeerKernel:
    """One kernel a gather, on a few multiprocessors: barrier, pulls, barrier. Lowest latency."""

    name: Name = "peer_kernel"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed as dist

        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self.copier = ShardCopier(group, device)
        self._sources = Sources(group, device)
        self._side = torch.cuda.Stream(device, priority=-1)

    def start(self, shard: Tensor, shard_bytes: list[int], image: Tensor) -> InFlight:
        shared = self._sources.prepare(shard_bytes, shard)
        pieces = image.split(shard_bytes)
        shards = self._sources.shards(shared, shard, shard_bytes, image)
        # Rank r starts with rank r + 1, so that no two ranks read from one peer at the same time.
        order = [(self._rank + step) % self._size for step in range(1, self._size)]
        own = pieces[self._rank]
        flight = InFlight(self._side, image, shard)
        with torch.cuda.stream(self._side):
            self._sources.fill(shared, shard)
            self.copier.gather(
                [(shards[peer], pieces[peer]) for peer in order],
                None if own.data_ptr() == shard.data_ptr() else (shard, own),
                blocks=_blocks(max(shard_bytes)),
            )
            flight.done()
        return flight


class BySize:
    """What a group of GPUs that read each other uses; every rank chooses alike, because the sizes are known to all."""

    name: Name = "by_size"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._kernel = PeerKernel(group, device)
        self._engine = CopyEngine(group, device, self._kernel.copier)

    def start(self, shard: Tensor, shard_bytes: list[int], image: Tensor) -> InFlight:
        # The kernel copies byte by byte what is not aligned to 16 bytes.
        small = max(shard_bytes) <= KERNEL_UP_TO_BYTES and all(size % 16 == 0 for size in shard_bytes)
        return (self._kernel if small else self._engine).start(shard, shard_bytes, image)
