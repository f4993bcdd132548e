"""Where the peer transports find the other ranks' shards: in place, or in a staging buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.cuda.all_gather_memory import Shared, find_shared, share
from baige_device.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Sources"]


class Sources:
    """Finds every rank's shard as memory of this process.

    A shard in memory of `allocate_shard` is read in place. Any other is first copied into a staging buffer, which
    costs one pass over it in device memory.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed as dist

        self._group = group
        self._rank = dist.get_rank(group)
        self._device = device
        self._staging: Shared | None = None

    def prepare(self, shard_bytes: list[int], shard: Tensor) -> Shared:
        """The allocation that the shards will be read from. Before a fork of streams, because it may synchronise."""
        found = find_shared(shard, self._group)
        return self._staging_for(max(shard_bytes)) if found is None else found

    def fill(self, shared: Shared, shard: Tensor) -> None:
        """Queue the staging copy where there is one; on the stream that the gather is on."""
        if shared is self._staging:
            shared.local[: shard.numel()].copy_(shard, non_blocking=True)

    def shards(self, shared: Shared, shard: Tensor, shard_bytes: list[int], image: Tensor) -> list[Tensor]:
        """Every rank's shard, by rank, as uint8 views."""
        offset = 0 if shared is self._staging else int(shard.storage_offset())
        offsets = [offset] * len(shard_bytes)
        starts = [int(image.storage_offset()) + sum(shard_bytes[:rank]) for rank in range(len(shard_bytes))]
        if find_shared(image, self._group) is shared and offset == starts[self._rank]:
            # The image itself is shared and each rank's shard is its own piece of it.
            offsets = starts
        return [
            peer[begin : begin + size] for peer, begin, size in zip(shared.peers, offsets, shard_bytes, strict=True)
        ]

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
