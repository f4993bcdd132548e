"""Memory that all ranks of a group can read: what the peer transports pull from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Shared", "allocate_shard", "find_shared", "share"]


@dataclass(frozen=True)
class Shared:
    """One symmetric allocation: the same number of bytes on every rank."""

    local: Tensor
    peers: list[Tensor]
    """uint8 views of every rank's allocation, the own one included."""
    handle: Any
    group: ProcessGroup


_shared: dict[int, Shared] = {}
"""Allocations made by `allocate_shard`, by the address of their storage. They live as long as the process."""


def share(num_bytes: int, group: ProcessGroup, device: torch.device) -> Shared:
    """Allocate `num_bytes` (>= 1) on every rank and map all of them; a collective of the group."""
    import torch.distributed._symmetric_memory as symmetric

    local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group)
    peers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]
    return Shared(local, peers, handle, group)


def allocate_shard(num_bytes: int, *, group: ProcessGroup | None = None) -> Tensor:
    """Device memory for a weight shard that the other ranks can pull without a staging copy. A collective.

    Every rank gets as many bytes as the largest request of all ranks and sees its own `num_bytes` of them. Pass the
    result, or the same slice of it on every rank, as the `shard` of `fp8_all_gather`; a rank whose shard is empty
    passes an empty slice. Where the group cannot share memory this is ordinary device memory.

    An image may be allocated so as well (with the image's size on every rank). A shard that is this rank's own piece
    of such an image is then gathered in place, without the local copy.

    Args:
        num_bytes: bytes of this rank's shard, >= 0. group: as for `fp8_all_gather`.
    Returns:
        uint8 `[num_bytes]` on the current device, uninitialised. It lives as long as the process.
    """
    import torch.distributed as dist

    from baige_device.backends.cuda.all_gather_choice import PEER_MEMORY, transport_for
    from baige_device.ops.base import group_rank_and_size

    device = torch.device("cuda", torch.cuda.current_device())
    if group_rank_and_size(group)[1] == 1 or transport_for(group, device).name not in PEER_MEMORY:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    wanted: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(wanted, num_bytes, group=group)
    real: ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
    found = share(max(1, *wanted), real, device)
    _shared[found.local.untyped_storage().data_ptr()] = found
    return found.local[:num_bytes]


def find_shared(shard: Tensor, group: ProcessGroup) -> Shared | None:
    """The allocation that a shard lies in, or None for ordinary memory."""
    found = _shared.get(shard.untyped_storage().data_ptr())
    return found if found is not None and found.group is group else None
