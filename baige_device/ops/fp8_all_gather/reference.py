"""Reference of `fp8_all_gather`: one asynchronous `all_gather` of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.ops.base import group_rank_and_size
from baige_device.ops.fp8_all_gather.contract import GatherHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["fp8_all_gather"]


class _Gather:
    """A gather in flight: `work` fills `parts`, which are pieces of the image or padded copies beside it."""

    def __init__(self, image: Tensor, parts: Sequence[Tensor], sizes: list[int], work: Work | None) -> None:
        self._image = image
        self._parts = parts
        self._sizes = sizes
        self._work = work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
            for piece, part in zip(torch.split(self._image, self._sizes), self._parts, strict=True):
                if part.data_ptr() != piece.data_ptr():
                    piece.copy_(part[: piece.numel()])
            self._parts = ()
        return self._image


def fp8_all_gather(
    shard: Tensor,
    shard_bytes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
) -> GatherHandle:
    """See the contract. Uneven shards travel padded to the largest, since `all_gather` wants equal sizes."""
    import torch.distributed as dist

    size = group_rank_and_size(group)[1]
    image = torch.empty(sum(shard_bytes), dtype=torch.uint8, device=shard.device) if out is None else out
    largest = max(shard_bytes)
    if size == 1 or largest == 0:
        image[: shard.numel()] = shard
        return _Gather(image, (), [], None)
    if min(shard_bytes) == largest:
        parts, sent = list(torch.split(image, largest)), shard
    else:
        parts = list(torch.empty(size, largest, dtype=torch.uint8, device=shard.device).unbind())
        sent = torch.zeros(largest, dtype=torch.uint8, device=shard.device)
        sent[: shard.numel()] = shard
    work = dist.all_gather(parts, sent, group=group, async_op=True)
    return _Gather(image, parts, list(shard_bytes), work)
