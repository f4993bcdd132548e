"""The transports that need no shared memory: NCCL on a side stream, and one through the host for any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.cuda.all_gather_choice import Name
from baige_device.backends.cuda.all_gather_stream import InFlight
from baige_device.ops.fp8_all_gather.contract import GatherHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Collective", "Staged"]


class Collective:
    """One NCCL all-gather into the image; shards of different sizes travel padded to the largest."""

    name: Name = "nccl"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._side = torch.cuda.Stream(device, priority=-1)

    def start(self, shard: Tensor, shard_bytes: list[int], image: Tensor) -> GatherHandle:
        import torch.distributed as dist

        flight = InFlight(self._side, image, shard)
        largest = max(shard_bytes)
        with torch.cuda.stream(self._side):
            if min(shard_bytes) == largest:
                dist.all_gather_into_tensor(image, shard, group=self._group)
            else:
                padded = shard.new_empty(largest)
                padded[: shard.numel()].copy_(shard)
                gathered = shard.new_empty(largest * len(shard_bytes))
                dist.all_gather_into_tensor(gathered, padded, group=self._group)
                for piece, whole in zip(image.split(shard_bytes), gathered.split(largest), strict=True):
                    piece.copy_(whole[: piece.numel()])
            flight.done()
        return flight


class _Done:
    def __init__(self, image: Tensor) -> None:
        self._image = image

    def wait(self) -> Tensor:
        return self._image


class Staged:
    """Through host memory and the group's own CPU collectives. Blocks the host; right everywhere, fast nowhere."""

    name: Name = "staged"

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def start(self, shard: Tensor, shard_bytes: list[int], image: Tensor) -> GatherHandle:
        import torch.distributed as dist

        largest = max(shard_bytes)
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: shard.numel()].copy_(shard)
        parts = list(torch.empty(len(shard_bytes), largest, dtype=torch.uint8).unbind())
        dist.all_gather(parts, padded, group=self._group)
        for piece, part in zip(image.split(shard_bytes), parts, strict=True):
            piece.copy_(part[: piece.numel()])
        return _Done(image)
