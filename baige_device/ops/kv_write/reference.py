"""Reference of `kv_write`: plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["converted", "kv_write"]


def converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values as the cache holds them: rounded to nearest, saturated where it is float8.

    torch's own conversion makes NaN of what does not fit; a clamp leaves NaN alone.
    """
    if dtype == torch.float8_e4m3fn and values.dtype != dtype:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def kv_write(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See the contract."""
    slots = slots[: values.shape[0]].long()
    named = slots >= 0
    slots, rows = slots[named], converted(values[named], cache.dtype)
    if cache.element_size() == 1:  # index kernels of the 8-bit floats are missing in older torch
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    page_tokens = cache.shape[1]
    if slots.numel():
        cache[slots // page_tokens, slots % page_tokens] = rows
