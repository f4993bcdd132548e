"""Which transport a process group uses: every rank says what it could do, and all take the same best answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from baige_device.backends.cuda.nvrtc import available
from baige_device.errors import BackendError
from baige_device.ops.fp8_all_gather.contract import GatherHandle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PEER_MEMORY", "Name", "Transport", "force_transport", "refusals", "transport_for"]

Name = Literal["by_size", "peer_kernel", "copy_engine", "nccl", "staged"]
_ORDER: tuple[Name, ...] = ("by_size", "copy_engine", "nccl", "staged")
PEER_MEMORY: tuple[Name, ...] = ("by_size", "peer_kernel", "copy_engine")
"""The transports that read the peers' memory, hence want shards in memory that peers can read."""

_KERNEL_FROM = (7, 0)
_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Transport(Protocol):
    """Moves the shards of one group."""

    name: Name

    def start(self, shard: Tensor, shard_bytes: list[int], image: Tensor) -> GatherHandle:
        """Queue the gather; called on every rank of the group in the same order."""


@dataclass(frozen=True)
class _Rank:
    """What one rank tells the others."""

    host: str
    device: str
    peers: tuple[str, ...]
    """Devices that this rank's device can read directly, as far as this process sees them."""
    symmetric: bool
    overlap: bool
    nccl: bool
    compiler: str
    """Why no kernel can be compiled on this rank, or an empty text."""


_forced: dict[ProcessGroup, Name] = {}
_chosen: dict[tuple[ProcessGroup, torch.device], Transport] = {}
_refused: dict[ProcessGroup, dict[Name, str]] = {}


def force_transport(group: ProcessGroup | None, name: Name) -> None:
    """Fix the transport of a group, on all its ranks alike; for measurements. Takes effect at once."""
    group = _real(group)
    _forced[group] = name
    for key in [key for key in _chosen if key[0] is group]:
        del _chosen[key]


def refusals(group: ProcessGroup | None) -> dict[Name, str]:
    """Why a group does not use its better transports; empty before its first gather."""
    return dict(_refused.get(_real(group), {}))


def transport_for(group: ProcessGroup | None, device: torch.device) -> Transport:
    """The group's transport; chosen, and its memory set up, at the first call, which is a collective.

    Raises:
        BackendError: the first call of a group is being captured in a graph.
    """
    group = _real(group)
    found = _chosen.get((group, device))
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise BackendError("fp8_all_gather: group: expected one gather of this group before graph capture, got none")
    name = _forced.get(group) or _agree(group, device)
    _chosen[group, device] = _make(name, group, device)
    return _chosen[group, device]


def _real(group: ProcessGroup | None) -> ProcessGroup:
    import torch.distributed as dist

    if group is not None:
        return group
    world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return world


def _make(name: Name, group: ProcessGroup, device: torch.device) -> Transport:
    if name == "by_size":
        from baige_device.backends.cuda.all_gather_peer import BySize

        return BySize(group, device)
    if name == "peer_kernel":
        from baige_device.backends.cuda.all_gather_peer import PeerKernel

        return PeerKernel(group, device)
    if name == "copy_engine":
        from baige_device.backends.cuda.all_gather_copy import CopyEngine

        return CopyEngine(group, device)
    if name == "nccl":
        from baige_device.backends.cuda.all_gather_collective import Collective

        return Collective(group, device)
    from baige_device.backends.cuda.all_gather_collective import Staged

    return Staged(group)


def _agree(group: ProcessGroup, device: torch.device) -> Name:
    import torch.distributed as dist

    ranks: list[_Rank] = [_describe(group, device)] * dist.get_world_size(group)
    dist.all_gather_object(ranks, _describe(group, device), group=group)
    reasons: dict[Name, str] = {}
    for name in _ORDER:
        reason = _REFUSE[name](ranks) if name in _REFUSE else ""
        if not reason:
            _refused[group] = reasons
            return name
        reasons[name] = reason
    raise AssertionError("the staged transport is always possible")


def _describe(group: ProcessGroup, device: torch.device) -> _Rank:
    import torch.distributed as dist

    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    peers = [
        _identity(index)
        for index in range(torch.cuda.device_count())
        if index != device.index and torch.cuda.can_device_access_peer(device.index, index)
    ]
    return _Rank(
        host,
        _identity(device.index),
        tuple(peers),
        symmetric=_has_symmetric_memory(),
        overlap=os.environ.get(_OVERLAP) == "1",
        nccl=dist.get_backend(group) == "nccl" or "cuda:nccl" in dist.get_backend(group),
        compiler=_no_compiler(device),
    )


def _no_compiler(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability < _KERNEL_FROM:
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    found = available()
    return "" if found.ok else found.reason


def _identity(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def _has_symmetric_memory() -> bool:
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError:
        return False
    return hasattr(symmetric, "empty") and hasattr(symmetric, "rendezvous")


def _no_copy_engine(ranks: list[_Rank]) -> str:
    if not all(rank.symmetric for rank in ranks):
        return "torch has no symmetric memory (torch >= 2.6 has)"
    if len({rank.host for rank in ranks}) > 1:
        return "the ranks are on several hosts"
    devices = {rank.device for rank in ranks}
    if len(devices) < len(ranks) and not all(rank.overlap for rank in ranks):
        return f"several ranks share one GPU and {_OVERLAP}=1 is not set"
    for rank in ranks:
        missing = devices - {rank.device} - set(rank.peers)
        if missing:
            return f"GPU {rank.device} cannot read GPU {sorted(missing)[0]} directly"
    return ""


def _no_kernel(ranks: list[_Rank]) -> str:
    from baige_device.backends.cuda.all_gather_kernel import MAX_RANKS

    if len(ranks) > MAX_RANKS:
        return f"{len(ranks)} ranks are more than the kernel's {MAX_RANKS}"
    return _no_copy_engine(ranks) or next((rank.compiler for rank in ranks if rank.compiler), "")


def _no_nccl(ranks: list[_Rank]) -> str:
    if not all(rank.nccl for rank in ranks):
        return "the group's backend is not NCCL"
    if len({(rank.host, rank.device) for rank in ranks}) < len(ranks):
        return "several ranks share one GPU, which NCCL refuses"
    return ""


_REFUSE: dict[Name, Callable[[list[_Rank]], str]] = {
    "by_size": _no_kernel,
    "copy_engine": _no_copy_engine,
    "nccl": _no_nccl,
}
"""Why the ranks cannot use a transport, or an empty text; `staged` is always possible."""
