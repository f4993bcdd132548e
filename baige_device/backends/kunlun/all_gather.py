"""`fp8_all_gather` over the process group that torch_xmlir calls `nccl` (BKCL): bytes as uint8, one collective a call.

BKCL has no float8 and adds int8 as uint8, so only uint8 images go over it and nothing is reduced. The group runs the
collective on its own stream where it can; with `BKCL_FORCE_SYNC=1`, or when all streams are one, it is merely earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.ops.base import group_rank_and_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Gathering", "fp8_all_gather"]


class Gathering:
    """An all-gather in flight. Shards of unequal size travel in equal, padded slots and are closed up by `wait`."""

    def __init__(self, image: Tensor, work: Work | None, slots: Tensor | None, shard_bytes: Sequence[int]) -> None:
        self._image = image
        self._work = work
        self._slots = slots
        self._shard_bytes = tuple(shard_bytes)

    def wait(self) -> Tensor:
        """See `GatherHandle.wait`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._slots is not None:
                parts = [slot[:size] for slot, size in zip(self._slots, self._shard_bytes, strict=True)]
                torch.cat(parts, out=self._image)
                self._slots = None
        return self._image


def fp8_all_gather(
    shard: Tensor,
    shard_bytes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
) -> Gathering:
    """See the contract. Unequal shards cost a padded buffer of N times the largest one and a copy on the device."""
    image = shard.new_empty(sum(shard_bytes)) if out is None else out
    _, size = group_rank_and_size(group)
    largest = max(shard_bytes)
    if size == 1 or largest == 0:
        image.copy_(shard)
        return Gathering(image, None, None, shard_bytes)
    import torch.distributed as dist

    if largest == min(shard_bytes):
        work = dist.all_gather_into_tensor(image, shard, group=group, async_op=True)
        return Gathering(image, work, None, shard_bytes)
    padded = torch.nn.functional.pad(shard, (0, largest - shard.shape[0]))
    slots = shard.new_empty(size, largest)
    work = dist.all_gather_into_tensor(slots.view(-1), padded, group=group, async_op=True)
    return Gathering(image, work, slots, shard_bytes)
