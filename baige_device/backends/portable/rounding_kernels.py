# mypy: ignore-errors
# Triton's kernel language is not Python to a type checker.
"""Rounding of fp32 results to the output's type, right in the interpreter too."""

import triton
import triton.language as tl

from baige_device.backends.portable.float_codec import encode_bf16
from baige_device.backends.portable.runtime import INTERPRET

CUTS_BITS = tl.constexpr(INTERPRET)  # the interpreter's own conversion to bf16 rounds toward zero


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """fp32 `values` as DTYPE, rounded to nearest even."""
    if CUTS_BITS and tl.bfloat16 == DTYPE:
        return encode_bf16(values).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)
