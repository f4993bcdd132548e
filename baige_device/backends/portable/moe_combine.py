"""`moe_combine` in Triton: reduce what this rank computed, send it home, add up.

Sums are fp32; between ranks rows travel in y's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.portable.moe_dispatch import PortableHandle
from baige_device.backends.portable.moe_routing import gather_sum
from baige_device.backends.portable.runtime import launching_on
from baige_device.errors import ContractError
from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["moe_combine"]


def moe_combine(y: Tensor, batch: ExpertBatch, *, out: Tensor | None = None) -> Tensor:
    """See `baige_device/ops/moe_combine/contract.py`."""
    handle: PortableHandle = batch.handle
    width = y.shape[-1]
    if out is not None and out.shape[0] != handle.tokens:
        raise ContractError("moe_combine", "out.shape[0]", f"{handle.tokens} dispatched tokens", str(out.shape[0]))
    if out is None:
        out = torch.empty((handle.tokens, width), dtype=y.dtype, device=y.device)
    rows = y.reshape(-1, width).contiguous()
    with launching_on(y):
        if handle.slots is not None:
            if handle.way is None:
                return gather_sum(rows, handle.slots, handle.weights, out)
            sums = y.new_empty((handle.arrived, width))
            rows = gather_sum(rows, handle.slots, handle.weights, sums)
        assert handle.way is not None
        return handle.way.bring_home(rows, out)
