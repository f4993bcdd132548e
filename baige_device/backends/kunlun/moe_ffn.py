"""`moe_expert_ffn`: the vendor's grouped products (`moe_fc`, or the masked one) around `swiglu`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baige_device.backends.kunlun import normalise, vendor
from baige_device.backends.kunlun.kv_write import HALF
from baige_device.backends.kunlun.moe import weighted_sum
from baige_device.backends.kunlun.moe_sort import sort_by_expert
from baige_device.errors import ContractError
from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["moe_expert_ffn"]


def moe_expert_ffn(batch: ExpertBatch, w13: Tensor, w2: Tensor, *, activation: str = "silu") -> Tensor:
    """See the contract; bf16 and fp16. No sync.

    Activations stay outside the product: the kernel's own `SWISH_GLU` is known to be wrong. fp16 in the masked layout
    runs `moe_fc` over the padding too, since the masked kernels write bf16 only.
    """
    if w13.dtype not in HALF:
        raise ContractError("moe_expert_ffn", "w13.dtype", "bf16 or fp16 on Kunlun", str(w13.dtype))
    x = batch.x
    if x.numel() == 0:
        return torch.zeros_like(x)
    if batch.layout == "flat":
        assert batch.topk_ids is not None
        assert batch.topk_weights is not None
        return _flat(x, batch.topk_ids, batch.topk_weights, w13, w2, activation)
    if batch.layout == "expert_major":
        assert batch.expert_starts is not None
        return _rows(x, batch.expert_starts, w13, w2, activation)
    if x.dtype is torch.bfloat16:
        hidden = _masked(x, w13, batch.expert_counts)
        active = _activate(hidden.view(-1, hidden.shape[2]), activation)
        return _masked(active.view(*x.shape[:2], -1), w2, batch.expert_counts)
    starts = torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
    return _rows(x.view(-1, x.shape[2]), starts, w13, w2, activation).view_as(x)


def _flat(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    order = sort_by_expert(x, ids, w13.shape[0])
    y = _rows(order.rows, order.starts, w13, w2, activation)
    return weighted_sum(y, torch.where(ids >= 0, order.row_of.long(), -1), weights)


def _rows(x: Tensor, starts: Tensor, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    """Rows sorted by expert; rows behind the last expert stay zero."""
    return _grouped(_activate(_grouped(x, w13, starts), activation), w2, starts)


def _grouped(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    count = x.shape[0]
    y = normalise.zeros((count, 1, weight.shape[1]), x.dtype, x.device)
    own = torch.arange(count, dtype=torch.int32, device=x.device)
    vendor.kernel_module().moe_fc(
        normalise.dense(x), normalise.dense(weight), normalise.int32(starts), own, 1, y, act=None, sort_mode=True
    )
    return y.squeeze(1)


def _masked(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    y = normalise.zeros((x.shape[0], x.shape[1], weight.shape[1]), x.dtype, x.device)
    vendor.kernel_module().m_grouped_gemm_bf16_bf16_bf16_nt_masked(
        normalise.dense(x), normalise.dense(weight), y, normalise.int32(counts), x.shape[1]
    )
    return y


def _activate(hidden: Tensor, activation: str) -> Tensor:
    """Gate in the first half of the columns, up in the second."""
    half = hidden.shape[1] // 2
    if activation == "silu":
        result = normalise.zeros((hidden.shape[0], half), hidden.dtype, hidden.device)
        vendor.kernel_module().swiglu(normalise.dense(hidden), result)
        return result
    gate, up = hidden.float().chunk(2, 1)
    return (functional.gelu(gate, approximate="tanh") * up).to(hidden.dtype)
