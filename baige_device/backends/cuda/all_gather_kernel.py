"""Launching `csrc/gather_shards.cu`: copies between peers by multiprocessors, with barriers inside the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baige_device.backends.cuda.all_gather_memory import share
from baige_device.backends.cuda.driver import context, kernel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MAX_RANKS", "ShardCopier"]

MAX_RANKS = 16
_MAX_BLOCKS = 128

Job = tuple[Tensor, Tensor]
"""(source, target): uint8 views of one size, either of them on a peer."""

_THREADS = 512
_MACROS: dict[str, str | int] = {"THREADS": _THREADS, "UNROLL": 8}
_LOCAL_BLOCKS = 8
"""Blocks that copy the own shard: half as many are slower than the link."""


class _Job(ctypes.Structure):
    _fields_ = [("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("bytes", ctypes.c_int64)]


class _Params(ctypes.Structure):
    _fields_ = [
        ("remote", _Job * MAX_RANKS),
        ("local", _Job),
        ("pads", ctypes.c_uint64 * MAX_RANKS),
        *[(name, ctypes.c_int) for name in ("jobs", "ranks", "rank", "link_blocks")],
    ]


class ShardCopier:
    """The kernel and its barrier pads, for one group on one device. Its making is a collective of the group."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed as dist

        self._device = device
        self._rank = dist.get_rank(group)
        pads = share(4 * _MAX_BLOCKS * (MAX_RANKS + 1), group, device)
        pads.local.zero_()
        pads.handle.barrier(channel=0)
        torch.cuda.synchronize(device)
        self._pads = pads

    def gather(self, remote: Sequence[Job], local: Job | None, *, blocks: int) -> None:
        """Queue a whole gather on the current stream: meet all ranks, copy, meet them again.

        Args:
            remote: at most one job a peer, done in this order by `blocks` blocks; every rank calls with equal `blocks`.
            local: done by a few blocks more.
        """
        params = _Params()
        for index, job in enumerate(remote):
            params.remote[index] = _job(job)
        params.jobs, params.link_blocks = len(remote), blocks
        params.ranks, params.rank = len(self._pads.peers), self._rank
        for rank, pad in enumerate(self._pads.peers):
            params.pads[rank] = pad.data_ptr()
        self._launch(params, local)

    def copy_local(self, local: Job) -> None:
        """Queue one copy within this device on the current stream; it meets nobody."""
        self._launch(_Params(), local)

    def _launch(self, params: _Params, local: Job | None) -> None:
        if local is not None:
            params.local = _job(local)
        grid = params.link_blocks + (_LOCAL_BLOCKS if local is not None else 0)
        index = self._device.index
        with context(index):
            function = kernel(index, "gather_shards.cu", "gather_shards", _MACROS)
            function.launch(grid, _THREADS, torch._C._cuda_getCurrentRawStream(index), params)


def _job(job: Job) -> _Job:
    source, target = job
    return _Job(source.data_ptr(), target.data_ptr(), source.numel())
