"""A product with gathered int8 weights as they are: no decoded copy, half the reads of a bf16 weight.

For callers that hold an `int8_absmax` image of `fp8_all_gather` (attention sharding). It is a function of this backend
and no op, since no other backend here has such a product. `quantise.dequantize_blocks` and a bf16 product are the
alternative, and probe `int8_product` says whether this one is exact enough on a build.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, vendor
from baige_device.backends.kunlun.kv_write import HALF
from baige_device.errors import ContractError

__all__ = ["Rows", "int8_linear", "int8_product", "quantise_rows"]

_NAME = "int8_linear"


class Rows(NamedTuple):
    """Activations as the product takes them."""

    payload: Tensor
    """int8 `[T, K]`."""
    absmax: Tensor
    """fp32 `[T, 1]`."""
    dtype: torch.dtype
    """The dtype they had, which is that of the result."""


def int8_linear(x: Tensor, payload: Tensor, scales: Tensor) -> Tensor:
    """`[T, N]` of x's dtype: x times the transposed weight.

    Args:
        x: bf16 or fp16 `[T, K]`, finite; quantised here to int8 by row.
        payload: int8 `[N, K]`, a weight of wire `int8_absmax` in blocks of one row (`block=(1, 0)`).
        scales: fp32 `[N, 1]`, as `quantize_blocks` gives them: `real = payload * scales`.
    Raises:
        ContractError: dtypes or shapes. Blocks of several rows or parts of rows have no such product: decode them.
    Error: against the decoded weight, half a step of x a product: `0.5 * max|x[t]| / 127 * sum over k of |w[n, k]|`,
        and one rounding to x's dtype. Cost: one pass over x and the kernel; no sync.
    """
    return int8_product(quantise_rows(x), payload, scales)


def quantise_rows(x: Tensor) -> Rows:
    """x bf16 or fp16 `[T, K]` to int8, once for all products with it (a weight may lie in several pieces)."""
    if x.dtype not in HALF or x.dim() != 2:
        raise ContractError(_NAME, "x", "bf16 or fp16 [T, K]", f"{x.dtype} {list(x.shape)}")
    rows = normalise.zeros(x.shape, torch.int8, x.device)
    absmax = normalise.zeros((x.shape[0], 1), torch.float32, x.device)
    if x.numel():
        vendor.kernel_module().quant2d(normalise.dense(x), rows, absmax, force_sdnn=True)
    return Rows(rows, absmax, x.dtype)


def int8_product(rows: Rows, payload: Tensor, scales: Tensor) -> Tensor:
    """`[T, N]`; see `int8_linear`."""
    if payload.dtype is not torch.int8 or payload.dim() != 2 or payload.shape[1] != rows.payload.shape[1]:
        expected = f"int8 [N, {rows.payload.shape[1]}]"
        raise ContractError(_NAME, "payload", expected, f"{payload.dtype} {list(payload.shape)}")
    if scales.dtype is not torch.float32 or scales.shape != (payload.shape[0], 1):
        expected = f"fp32 [{payload.shape[0]}, 1] (one scale a row)"
        raise ContractError(_NAME, "scales", expected, f"{scales.dtype} {list(scales.shape)}")
    result = normalise.zeros((rows.payload.shape[0], payload.shape[0]), rows.dtype, payload.device)
    if result.numel() and payload.numel():
        vendor.kernel_module().matmul(
            rows.payload,
            normalise.dense(payload),
            result,
            x_trans=False,
            w_trans=True,
            x_pc_max=rows.absmax,
            w_pc_max=normalise.dense(normalise.absmax_of_scale(scales)),
        )
    return result
