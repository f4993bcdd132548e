"""Views of HiSparse's pools as the rows that our copy ops move. Nothing is copied here."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import MountError

__all__ = ["DSV4_PAGE_TOKENS", "dsv4_rows", "token_rows"]

DSV4_PAGE_TOKENS = 64
_DSV4_VALUE_BYTES, _DSV4_SCALE_BYTES = 576, 8
_DSV4_PAGE_BYTES = 37440
"""64 values, then 64 scales, padded to a multiple of 576."""


def token_rows(pool: Tensor) -> Tensor:
    """uint8 `[S, row_bytes]` of a pool `[S, ...]` whose tokens are dense; rows are moved as bytes."""
    return pool.flatten(1).view(torch.uint8)


def dsv4_rows(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Values `[P, 64, 576]` and scales `[P, 64, 8]`, uint8, of a page-padded C4 pool `[P, ...]` of DeepSeek V4.

    Raises:
        MountError: a page has another size.
    """
    pages = pool.flatten(1).view(torch.uint8)
    if pages.shape[1] != _DSV4_PAGE_BYTES:
        raise MountError(
            f"sglang: HiSparse of DeepSeek V4: a page: expected {_DSV4_PAGE_BYTES} bytes, got {pages.shape[1]}"
        )
    values, scales, _ = pages.split(
        [
            DSV4_PAGE_TOKENS * _DSV4_VALUE_BYTES,
            DSV4_PAGE_TOKENS * _DSV4_SCALE_BYTES,
            _DSV4_PAGE_BYTES - DSV4_PAGE_TOKENS * (_DSV4_VALUE_BYTES + _DSV4_SCALE_BYTES),
        ],
        dim=1,
    )
    return values.unflatten(1, (DSV4_PAGE_TOKENS, -1)), scales.unflatten(1, (DSV4_PAGE_TOKENS, -1))
