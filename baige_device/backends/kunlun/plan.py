"""Copy plans of gather and scatter: which entries are live, on the device or on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise

__all__ = ["HostPlan", "live_rows", "on_host"]

HostPlan = tuple[Tensor, Tensor]
"""int64 source and destination rows of the live entries, on the host."""


def live_rows(src_rows: Tensor, dst_rows: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """The plan flattened to int64 `[N]` on its device, with -1 in both lists for entries at and after the count."""
    if count is not None:
        positions = torch.arange(src_rows.shape[-1], device=src_rows.device)
        live = positions < (count.unsqueeze(1) if src_rows.dim() == 2 else count)
        src_rows = torch.where(live, src_rows, -1)
        dst_rows = torch.where(live, dst_rows, -1)
    return normalise.int64(src_rows).flatten(), normalise.int64(dst_rows).flatten()


def on_host(src_rows: Tensor, dst_rows: Tensor, count: Tensor | None) -> HostPlan:
    """The plan's live entries on the host, in order. One copy to the host, which is a full device sync."""
    packed = torch.stack(live_rows(src_rows, dst_rows, count))
    source, target = normalise.host_copy(packed).unbind(0)
    keep = target >= 0
    return source[keep], target[keep]
