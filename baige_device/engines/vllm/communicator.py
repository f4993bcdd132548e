"""Collectives of the platform's process groups: the host's, plus the two that data parallelism with EP may ask for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

__all__ = ["ChipCommunicator", "Communicator"]


class _RowCounts:
    """The collectives with a row count per rank, which gloo and BKCL have only for equal counts."""

    rank_in_group: int
    world_size: int
    device_group: dist.ProcessGroup

    def all_gatherv(self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None) -> object:
        """Concatenate the ranks' rows; `sizes` are the rows of each rank (None: equal)."""
        if dim != 0:
            raise NotImplementedError(f"all_gatherv: dim: expected 0, got {dim}")
        if isinstance(input_, list):
            return [self._gather_rows(part, sizes) for part in input_]
        return self._gather_rows(input_, sizes)

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        """Sum over the ranks and return this rank's rows; `sizes` are the rows of each rank (None: equal)."""
        if dim not in (0, -1) or (dim == -1 and input_.dim() != 1):
            raise NotImplementedError(f"reduce_scatterv: dim: expected 0, got {dim}")
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        first = sum(sizes[: self.rank_in_group])
        return total[first : first + sizes[self.rank_in_group]].clone()

    def _gather_rows(self, rows: Tensor, sizes: list[int] | None) -> Tensor:
        sizes = sizes or [rows.shape[0]] * self.world_size
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class Communicator(_RowCounts, CpuCommunicator):
    """For host tensors."""


class ChipCommunicator(_RowCounts, DeviceCommunicatorBase):
    """For device tensors, by `torch.distributed` alone: no custom all-reduce, no symmetric memory."""
