"""Row pools in every layout that the contracts accept, inside guarded storages full of random bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baige_device.testing.lab import GUARD, Lab

__all__ = ["LAYOUTS", "PAGE", "PoolLayout", "STALE_ROWS", "pool", "pool_row"]

PAGE = 4
"""Rows of one page in the paged layouts."""
STALE_ROWS = 8
"""Rows of storage behind every pool: row ids that point there are out of the pool but not out of memory."""


@dataclass(frozen=True)
class PoolLayout:
    """Strides of a pool in elements beyond the dense ones."""

    paged: bool = False
    row_gap: int = 0
    page_gap: int = 0
    offset: int = 0
    """Elements in front of the pool beyond the guard: 1 makes the base address misaligned."""
    transposed_pages: bool = False
    """Pages are the inner of two interleaved caches ([P, 2, N, W])."""


LAYOUTS: dict[str, PoolLayout] = {
    "flat": PoolLayout(),
    "flat-gap": PoolLayout(row_gap=3),
    "flat-offset-1": PoolLayout(offset=1),
    "flat-offset-2": PoolLayout(offset=2),
    "flat-offset-4": PoolLayout(offset=4),
    "flat-offset-8": PoolLayout(offset=8),
    "paged": PoolLayout(paged=True),
    "paged-gap": PoolLayout(paged=True, page_gap=5),
    "paged-row-gap-offset-1": PoolLayout(paged=True, row_gap=3, page_gap=7, offset=1),
    "paged-interleaved": PoolLayout(paged=True, transposed_pages=True),
}


def pool(lab: Lab, rows: int, width: int, dtype: torch.dtype, layout: PoolLayout, *, host: bool) -> Tensor:
    """A pool of at least `rows` rows (`[S, W]` or `[P, N, W]`) of random bytes, on the host or on the device."""
    row_stride = width + layout.row_gap
    page_stride = PAGE * row_stride * (2 if layout.transposed_pages else 1) + layout.page_gap
    pages = -(-rows // PAGE)
    span = pages * page_stride if layout.paged else rows * row_stride
    span += STALE_ROWS * max(row_stride, page_stride // PAGE)
    offset = GUARD + layout.offset
    itemsize = torch.empty(0, dtype=dtype).element_size()
    count = (offset + span + GUARD) * itemsize
    raw = lab.host_bytes(count) if host else torch.empty(count, dtype=torch.uint8, device=lab.device)
    base = lab.bytes_like(raw).view(dtype)
    if layout.paged:
        return base.as_strided((pages, PAGE, width), (page_stride, row_stride, 1), offset)
    return base.as_strided((rows, width), (row_stride, 1), offset)


def pool_row(tensor: Tensor, row: int) -> Tensor:
    """View of one row by its id."""
    return tensor[row] if tensor.dim() == 2 else tensor[row // tensor.shape[1], row % tensor.shape[1]]
