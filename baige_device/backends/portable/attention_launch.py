"""What the attention launchers share: block shapes, pool strides, and the buffers and merge of a split call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from baige_device.backends.portable.runtime import power_of_2
from baige_device.backends.portable.softmax_kernels import merge_splits_kernel

__all__ = ["LOG2_E", "Pool", "Tiles", "distance", "merge_splits", "offset_type", "partial_buffers"]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiles:
    """Block shapes and launch options of one attention kernel. `resident` programs fit on a multiprocessor at once."""

    heads: int
    rows: int
    warps: int
    stages: int
    resident: int
    apart: bool = False
    """Hide from the compiler that one product feeds the next; see `sparse_kernel`."""


@dataclass(frozen=True)
class Pool:
    """Element strides of a `[S, G, D]` or `[P, N, G, D]` pool. A paged pool without gaps is read as a flat one."""

    page_tokens: int
    page: int
    row: int
    group: int
    paged: bool

    @classmethod
    def of(cls, pool: Tensor) -> Pool:
        if pool.dim() == 3:
            return cls(1, 0, pool.stride(0), pool.stride(1), False)
        page, row, group, _ = pool.stride()
        tokens = pool.shape[1]
        return cls(tokens, page, row, group, page != tokens * row)


def distance(first: Tensor, second: Tensor) -> int:
    """Elements from the first tensor's start to the second's: the kernels address both from one pointer."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


def offset_type(pools: tuple[Tensor, ...], extra: bool) -> tl.dtype:
    """int32 when the offsets of one pool fit: half the registers of 64-bit addresses. A second pool lies anywhere."""
    reach = max(
        sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True)) for pool in pools
    )
    return tl.int64 if extra or reach >= 2**31 - 1 else tl.int32


def partial_buffers(splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `[S, T, H, Dv]` and `[S, T, H]` for the parts of a split call; the outputs themselves for one part."""
    if splits == 1:
        return out.unsqueeze(0), lse.unsqueeze(0)
    part_out = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    return part_out, torch.empty((splits, *lse.shape), dtype=torch.float32, device=out.device)


def merge_splits(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the parts of a split call into its outputs; nothing to do for one part."""
    splits, (tokens, heads, width) = part_out.shape[0], out.shape
    if splits == 1:
        return
    merge_splits_kernel[(tokens * heads,)](
        part_out,
        part_lse,
        out,
        lse,
        tokens * heads,
        heads,
        *out.stride()[:2],
        *lse.stride(),
        WIDTH=width,
        WIDTH_BLOCK=power_of_2(width),
        SPLITS=splits,
        SPLITS_BLOCK=power_of_2(splits),
        num_warps=4 if width > 128 else 1,
    )
