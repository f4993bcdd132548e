"""The copy-engine transport: every rank pulls the others' shards through peer-mapped memory; no core is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.cuda.all_gather_choice import Name
from baige_device.backends.cuda.all_gather_memory import Shared, find_shared, share
from baige_device.backends.cuda.all_gather_stream import InFlight
from baige_device.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CopyEngine"]

_LANES = 2
"""Streams that a pull is spread over; with several peers their copies overlap, one peer gains little from it."""

_MIN_PIECE_BYTES = 8 << 20


class CopyEngine:
    """Barrier, pulls, barrier on side streams: nobody reads a shard early or overwrites one that is still read.

    A shard in memory of `allocate_shard` is pulled in place. Any other shard is first copied into a staging buffer,
    which costs one pass over it in device memory.
    """

    name: Name = "copy_engine"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed as dist

        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._control = share(1 << 12, group, device)
        self._staging: Shared | None = None
        self._side = torch.cuda.Stream(device, priority=-1)
        self._lanes = [torch.cuda.Stream(device, priority=-1) for _ in range(_LANES)]

    def start(self, shard: Tensor, shard_bytes: list[int], image: Tensor) -> InFlight:
        source = find_shared(shard, self._group)
        offset = 0 if source is None else int(shard.storage_offset())
        if source is None:
            source = self._staging_for(max(shard_bytes))
        flight = InFlight(self._side, image, shard)
        with torch.cuda.stream(self._side):
            if source is self._staging:
                source.local[: shard.numel()].copy_(shard, non_blocking=True)
            self._control.handle.barrier(channel=0)
            self._pull(source, offset, shard, shard_bytes, image)
            self._control.handle.barrier(channel=1)
            flight.done()
        return flight

    def _staging_for(self, num_bytes: int) -> Shared:
        """A staging buffer of at least this size. All ranks know all sizes, so all of them grow it together."""
        if self._staging is None or self._staging.local.numel() < num_bytes:
            if torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"fp8_all_gather: shard: expected a gather of {num_bytes} bytes or more before graph capture, got "
                    "none; warm up once, or take the shard from allocate_shard"
                )
            torch.cuda.synchronize(self._device)
            self._staging = share(num_bytes, self._group, self._device)
        return self._staging

    def _pull(self, source: Shared, offset: int, shard: Tensor, shard_bytes: list[int], image: Tensor) -> None:
        pieces = image.split(shard_bytes)
        for lane in self._lanes:
            lane.wait_stream(self._side)
        # Rank r starts with rank r + 1, so that no two ranks read from one peer at the same time.
        for step in range(1, self._size):
            peer = (self._rank + step) % self._size
            remote = source.peers[peer][offset : offset + shard_bytes[peer]]
            self._copy(pieces[peer], remote)
        pieces[self._rank].copy_(shard, non_blocking=True)
        for lane in self._lanes:
            self._side.wait_stream(lane)

    def _copy(self, target: Tensor, remote: Tensor) -> None:
        count = len(self._lanes) if target.numel() >= len(self._lanes) * _MIN_PIECE_BYTES else 1
        step = max(1, -(-target.numel() // count))
        for lane, to, what in zip(self._lanes, target.split(step), remote.split(step), strict=False):
            with torch.cuda.stream(lane):
                to.copy_(what, non_blocking=True)
