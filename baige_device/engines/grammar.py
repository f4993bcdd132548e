"""Constrained decoding without a compiled kernel: a grammar's token bitmask applied to logits in vendor-neutral torch.

For chips without Triton: the engines apply it by Triton or JIT-compiled kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baige_device.errors import ContractError

__all__ = ["apply_token_bitmask"]

_OP = "apply_token_bitmask"
_BITS = 32


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, indices: Tensor | Sequence[int] | None = None) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: `[B, V]` float of any strides; other values stay as they are, NaN included.
        bitmask: int32 `[B', W]` on the same device; token v is allowed when bit v % 32 of word v // 32 is set. Bits
            beyond V are padding; tokens beyond 32·W are left alone.
        indices: distinct rows to mask, row i of the logits by row i of the bitmask; None is all rows (then B' = B).
    Raises:
        ContractError: shapes, dtypes or devices.
    Cost: reads and writes the masked rows once, with a workspace of 4 bytes a logit. Fixed shapes, no sync with
    `indices` as a tensor; a list is one copy to the device.
    """
    _check(logits, bitmask, indices)
    words = min(bitmask.shape[1], -(-logits.shape[1] // _BITS))
    covered = min(logits.shape[1], words * _BITS)
    if indices is None:
        logits[:, :covered].masked_fill_(_forbidden(bitmask[:, :words], covered), -math.inf)
        return
    rows = torch.as_tensor(indices, dtype=torch.int64, device=logits.device)
    forbidden = _forbidden(bitmask[:, :words].index_select(0, rows), covered)
    view = logits[:, :covered]
    view.index_copy_(0, rows, view.index_select(0, rows).masked_fill_(forbidden, -math.inf))


def _forbidden(words: Tensor, tokens: int) -> Tensor:
    """bool `[b, tokens]`."""
    bits = torch.arange(_BITS, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, :tokens] == 0


def _check(logits: Tensor, bitmask: Tensor, indices: Tensor | Sequence[int] | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ContractError(_OP, "logits", "a float tensor [B, V]", f"{logits.dtype} {list(logits.shape)}")
    if bitmask.dim() != 2 or bitmask.dtype != torch.int32:
        raise ContractError(_OP, "bitmask", "an int32 tensor [B, W]", f"{bitmask.dtype} {list(bitmask.shape)}")
    if bitmask.device != logits.device:
        raise ContractError(_OP, "bitmask.device", str(logits.device), str(bitmask.device))
    if indices is None and bitmask.shape[0] != logits.shape[0]:
        raise ContractError(_OP, "bitmask.shape[0]", f"{logits.shape[0]}, as the logits", str(bitmask.shape[0]))
