"""float8_e4m3fn from its bit layout, in float64: an oracle that uses no float8 arithmetic of torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["E4M3_MAX", "decode_e4m3", "e4m3_values", "nearest_e4m3"]

E4M3_MAX = 448.0


def e4m3_values() -> Tensor:
    """float64 `[256]`: value of every code; 0x7F and 0xFF are NaN."""
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            values.append(float("nan"))
        elif exponent == 0:
            values.append(sign * mantissa * 2.0**-9)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values, dtype=torch.float64)


def decode_e4m3(payload: Tensor) -> Tensor:
    """float64 values of a float8_e4m3fn or uint8 tensor, on the CPU."""
    codes = payload.cpu().contiguous().view(torch.uint8)
    return e4m3_values()[codes.long()]


def nearest_e4m3(values: Tensor) -> Tensor:
    """The nearest finite e4m3 value of each float64 value, ties to even, saturating at ±448."""
    grid = e4m3_values()[:127]
    magnitude = values.abs().clamp(max=E4M3_MAX)
    upper = torch.searchsorted(grid, magnitude.contiguous()).clamp(max=126)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = grid[upper] - magnitude, magnitude - grid[lower]
    take_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0))
    found = torch.where(take_lower, grid[lower], grid[upper])
    return torch.copysign(found, values)
