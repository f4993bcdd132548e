"""Quantisation kernels. Their factor is the absolute maximum of a row: a scale in its place is off by 127, silently."""

from __future__ import annotations

from typing import Any

import torch
from kunlun_emulator.checks import contiguous, dtype, expect, kernel, shape
from torch import Tensor

__all__ = ["dequant2d_per_token", "matmul", "quant2d"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@kernel
def quant2d(x: Tensor, y: Tensor, max: Tensor, force_sdnn: bool = True) -> None:
    op = "quant2d"
    dtype(op, _FLOATS, x=x)
    dtype(op, torch.int8, y=y)
    dtype(op, torch.float32, max=max)
    shape(op, "x", x, -1, -1)
    shape(op, "y", y, *x.shape)
    shape(op, "max", max, x.shape[0], 1)
    contiguous(op, x=x, y=y, max=max)
    wide = x.float()
    peak = wide.abs().amax(1, keepdim=True)
    max.copy_(peak)
    y.copy_((wide * (127.0 / torch.where(peak > 0, peak, 1.0))).round().clamp(-127, 127))


@kernel
def dequant2d_per_token(x: Tensor, scale: Tensor, out: Tensor, is_absmax: bool = True) -> None:
    op = "dequant2d_per_token"
    dtype(op, torch.int8, x=x)
    dtype(op, torch.float32, scale=scale)
    dtype(op, _FLOATS, out=out)
    shape(op, "scale", scale, x.shape[0], 1)
    shape(op, "out", out, *x.shape)
    contiguous(op, x=x, scale=scale, out=out)
    out.copy_(x.float() * (scale / 127.0 if is_absmax else scale))


@kernel
def matmul(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    x_trans: bool = False,
    w_trans: bool = True,
    alpha: float = 1,
    beta: float = 0,
    bias: Tensor | None = None,
    x_max: Any = None,
    w_max: Any = None,
    x_pc_max: Tensor | None = None,
    w_pc_max: Tensor | None = None,
) -> None:
    op = "matmul"
    expect(not x_trans and w_trans, op, "only x [M, K] and w [N, K] are emulated")
    dtype(op, torch.float32, bias=bias, x_pc_max=x_pc_max, w_pc_max=w_pc_max)
    contiguous(op, x=x, w=w, out=out, x_pc_max=x_pc_max, w_pc_max=w_pc_max)
    dtype(op, x.dtype, w=w)
    dtype(op, _FLOATS, out=out)
    shape(op, "w", w, -1, x.shape[1])
    shape(op, "out", out, x.shape[0], w.shape[0])
    product = (x.double() @ w.double().T).float() if x.dtype is torch.int8 else x.float() @ w.float().T
    if x.dtype is torch.int8:
        expect(x_pc_max is not None and w_pc_max is not None, op, "int8 operands need their absmax")
        expect(x_pc_max.numel() == x.shape[0] and w_pc_max.numel() == w.shape[0], op, "one absmax a row")
        assert x_pc_max is not None
        assert w_pc_max is not None
        product = product * (x_pc_max.view(-1, 1) / 127.0) * (w_pc_max.view(1, -1) / 127.0)
    out.copy_(product if bias is None else product + bias)
