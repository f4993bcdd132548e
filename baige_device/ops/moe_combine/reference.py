"""Reference of `moe_combine`: reduce what this rank computed, send it home, add up; fp32 throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.ops.moe_dispatch.exchange import exchange_rows
from baige_device.ops.moe_dispatch.reference import DispatchHandle

__all__ = ["moe_combine"]


def moe_combine(y: Tensor, batch: ExpertBatch, *, out: Tensor | None = None) -> Tensor:
    """See the contract."""
    handle: DispatchHandle = batch.handle
    if out is not None and out.shape[0] != handle.tokens:
        raise ContractError("moe_combine", "out.shape[0]", f"{handle.tokens} dispatched tokens", str(out.shape[0]))
    home = exchange_rows(_reduce_here(y, handle), handle.receives, handle.sends, handle.group)
    total = torch.zeros(handle.tokens, y.shape[-1], dtype=torch.float32, device=y.device)
    total.index_add_(0, handle.sent_tokens, home.float())
    return total.to(y.dtype) if out is None else out.copy_(total)


def _reduce_here(y: Tensor, handle: DispatchHandle) -> Tensor:
    """One row a received (token, rank): y itself when flat, else fp32 sums over this rank's experts."""
    if handle.entry_rows is None or handle.entry_slots is None or handle.entry_weights is None:
        return y
    outputs = y.flatten(0, -2)[handle.entry_slots].float() * handle.entry_weights.unsqueeze(1)
    rows = torch.zeros(sum(handle.receives), y.shape[-1], dtype=torch.float32, device=y.device)
    return rows.index_add_(0, handle.entry_rows, outputs)
