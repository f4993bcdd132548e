"""Reference of `kv_write`: plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kv_write"]


def kv_write(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See the contract."""
    slots = slots[: values.shape[0]].long()
    named = slots >= 0
    slots, rows = slots[named], values[named].to(cache.dtype)
    if cache.element_size() == 1:  # index kernels of the 8-bit floats are missing in older torch
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    page_tokens = cache.shape[1]
    if slots.numel():
        cache[slots // page_tokens, slots % page_tokens] = rows
