"""e4m3 and bf16 by integer arithmetic, for targets that cannot convert them well: older GPUs, the interpreter."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from baige_device.backends.portable.runtime import INTERPRET

__all__ = ["decode_e4m3", "encode_bf16", "encode_e4m3", "has_native_e4m3"]

_NATIVE_FROM = (8, 9)


@functools.cache
def has_native_e4m3(device: torch.device) -> bool:
    """Whether Triton converts to and from e4m3 on this device."""
    return not INTERPRET and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE_FROM


@triton.jit
def encode_e4m3(values):  # type: ignore[no-untyped-def]
    """fp32 with magnitude <= 448 -> the nearest e4m3 code as uint8, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the grid is 2**-9; adding and taking off 1.5 * 2**23 rounds to the nearest even step.
    steps = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0) - 12582912.0
    code = tl.where(magnitude < 0x3C800000, steps.to(tl.int32), normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):  # type: ignore[no-untyped-def]
    """e4m3 codes as uint8 -> fp32, exactly."""
    wide = codes.to(tl.int32)
    magnitude = wide & 0x7F
    normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)


@triton.jit
def encode_bf16(values):  # type: ignore[no-untyped-def]
    """fp32 -> the bits of the nearest bf16 as int16, ties to even. The interpreter's own conversion cuts bits off."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
