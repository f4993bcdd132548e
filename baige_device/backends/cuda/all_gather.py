"""`fp8_all_gather` on CUDA: one op, four transports, chosen by all ranks of a group together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.cuda.all_gather_choice import transport_for
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.fp8_all_gather.contract import GatherHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["fp8_all_gather"]


class _Ready:
    """An image that needs no waiting: its work is on the stream that the caller is on."""

    def __init__(self, image: Tensor) -> None:
        self._image = image

    def wait(self) -> Tensor:
        return self._image


def fp8_all_gather(
    shard: Tensor,
    shard_bytes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
) -> GatherHandle:
    """See the contract. The first call of a group is a rendezvous and cannot be captured in a graph."""
    size = group_rank_and_size(group)[1]
    total = sum(shard_bytes)
    image = torch.empty(total, dtype=torch.uint8, device=shard.device) if out is None else out
    if size == 1:
        return _Ready(image.copy_(shard))
    if total == 0:
        return _Ready(image)
    return transport_for(group, shard.device).start(shard, list(shard_bytes), image)
