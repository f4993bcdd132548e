"""`kv_write` in Triton: one pass, bound by launch for decode and by memory for prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.portable.kv_write_kernels import kv_write_kernel
from baige_device.backends.portable.runtime import INTERPRET, launching_on, power_of_2
from baige_device.ops.kv_write.reference import converted

__all__ = ["kv_write"]

_ELEMENTS_PER_PROGRAM = 4096


def kv_write(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `baige_device/ops/kv_write/contract.py`."""
    tokens, groups, width = values.shape
    if values.numel() == 0:
        return
    if INTERPRET:
        values = converted(values, cache.dtype)  # the interpreter's own conversions round toward zero
    convert = values.dtype != cache.dtype
    to_e4m3 = convert and cache.dtype == torch.float8_e4m3fn
    if not convert and values.element_size() == 1:
        values, cache = values.view(torch.uint8), cache.view(torch.uint8)
    block_d = power_of_2(width, 1)
    block_g = min(power_of_2(groups, 1), max(1, _ELEMENTS_PER_PROGRAM // block_d))
    with launching_on(values):
        kv_write_kernel[(tokens, -(-groups // block_g))](
            values,
            cache,
            slots,
            slots.stride(0),
            cache.shape[1],
            *values.stride()[:2],
            *cache.stride()[:3],
            groups,
            D=width,
            BLOCK_G=block_g,
            BLOCK_D=block_d,
            CONVERT=convert,
            TO_E4M3=to_e4m3,
        )
