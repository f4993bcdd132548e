"""`moe_expert_ffn` in Triton: two grouped matrix products whose tile map is found on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baige_device.backends.portable.moe_dispatch import PortableHandle
from baige_device.backends.portable.moe_ffn_kernels import down_kernel, up_kernel
from baige_device.backends.portable.moe_routing import gather_sum, lay_out, route
from baige_device.backends.portable.runtime import INTERPRET, dot_dtype, launching_on, power_of_2
from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["moe_expert_ffn"]


@dataclass(frozen=True)
class _Grouped:
    """Rows `x [R, H]` grouped by expert; `entries` bounds the rows that are no padding."""

    x: Tensor
    counts: Tensor
    starts: Tensor | None
    rows_per_expert: int
    entries: int


def moe_expert_ffn(batch: ExpertBatch, w13: Tensor, w2: Tensor, *, activation: str = "silu") -> Tensor:
    """See `baige_device/ops/moe_expert_ffn/contract.py`. Does not synchronise."""
    with launching_on(batch.x):
        if batch.layout == "flat":
            return _flat(batch, w13, w2, activation)
        x = batch.x.contiguous()
        entries = x.numel() // max(1, x.shape[-1])
        if isinstance(batch.handle, PortableHandle) and batch.handle.slots is not None:
            entries = min(entries, batch.handle.slots.numel())
        rows_per_expert = x.shape[1] if batch.layout == "masked" else 0
        grouped = _Grouped(x.flatten(0, -2), batch.expert_counts, batch.expert_starts, rows_per_expert, entries)
        return _run(grouped, w13, w2, activation).view(batch.x.shape)


def _flat(batch: ExpertBatch, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    routing = route(batch.topk_ids, 0, batch.expert_counts.shape[0])
    rows = batch.topk_ids.numel()
    x = lay_out(batch.x, routing, rows, clear=False)
    grouped = _Grouped(x, routing.counts, routing.starts, 0, rows)
    outputs = _run(grouped, w13, w2, activation)
    return gather_sum(outputs, routing.slots, batch.topk_weights, torch.empty_like(batch.x))


def _run(grouped: _Grouped, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    rows, width = grouped.x.shape
    experts, inner = w2.shape[0], w2.shape[2]
    masked = grouped.starts is None
    y = torch.zeros_like(grouped.x) if masked else torch.empty_like(grouped.x)
    if rows == 0 or width == 0:
        return y
    if inner == 0:
        return y.zero_()
    hidden = torch.empty((rows, inner), dtype=grouped.x.dtype, device=y.device)
    dot = dot_dtype(grouped.x)
    m, n, k, warps, stages = _blocks(grouped.entries // experts, str(dot) == "fp32")
    row_tiles = (grouped.entries if masked else rows) // m + experts
    starts = grouped.counts if grouped.starts is None else grouped.starts
    shape = (experts, grouped.rows_per_expert, rows, row_tiles, width, inner)
    options = {
        "EXPERTS": power_of_2(experts, 1),
        "MASKED": masked,
        "DOT": dot,
        "BLOCK_M": m,
        "BLOCK_K": k,
        "num_warps": warps,
        "num_stages": stages,
    }
    up_kernel[(row_tiles * -(-inner // n),)](
        grouped.x,
        w13,
        starts,
        grouped.counts,
        hidden,
        *shape,
        *w13.stride(),
        GELU=activation == "gelu",
        BLOCK_N=n,
        **options,
    )
    wide = n if INTERPRET else 2 * n
    down_kernel[(row_tiles * -(-width // wide),)](
        hidden, w2, starts, grouped.counts, y, *shape, *w2.stride(), BLOCK_N=wide, **options
    )
    return y


def _blocks(rows_per_expert: int, single: bool) -> tuple[int, int, int, int, int]:
    """(rows, columns, depth, warps, stages) of a tile, by the mean rows of an expert."""
    if INTERPRET:
        return 16, 16, 16, 4, 1
    if single:
        return 16, 32, 32, 4, 2
    if rows_per_expert <= 16:
        return 16, 64, 128, 4, 4
    if rows_per_expert <= 64:
        return 64, 64, 64, 4, 4
    return 128, 64, 64, 8, 4
