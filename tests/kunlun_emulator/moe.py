"""The MoE chain. Expert -1 is out of range, and rows that belong to no expert are not written."""

from __future__ import annotations

from typing import Any

import torch
from kunlun_emulator.checks import contiguous, dtype, expect, kernel, shape
from kunlun_emulator.state import STATE
from torch import Tensor
from torch.nn import functional

__all__ = [
    "gen_block_statistic",
    "m_grouped_gemm_bf16_bf16_bf16_nt_masked",
    "moe_fc",
    "moe_post",
    "moe_pre_small",
    "moe_pre_sorted",
    "swiglu",
]

_HALF = (torch.bfloat16, torch.float16)


def _check_ids(op: str, ids: Tensor, experts: int) -> None:
    dtype(op, torch.int32, topk_ids=ids)
    shape(op, "topk_ids", ids, -1, -1)
    contiguous(op, topk_ids=ids)
    bad = (ids < 0) | (ids >= experts)
    expect(not bad.any(), op, f"expert ids outside [0, {experts}) are an out-of-range access")


def _sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted row of each (token, choice), the order, and the tokens of each expert."""
    flat = ids.flatten().long()
    order = (
        flat.argsort(stable=True)
        if STATE.profile.moe_stable
        else (flat * flat.numel() - torch.arange(flat.numel())).argsort()
    )
    index = torch.empty_like(order)
    index[order] = torch.arange(flat.numel())
    return index, order, torch.bincount(flat, minlength=experts)


@kernel
def gen_block_statistic(topk_ids: Tensor, block_statistic: Tensor) -> None:
    op = "gen_block_statistic"
    dtype(op, torch.int32, block_statistic=block_statistic)
    shape(op, "block_statistic", block_statistic, 12, -1)
    expect(not block_statistic.any(), op, "block_statistic must be zeroed by the caller")
    _check_ids(op, topk_ids, block_statistic.shape[1])
    for cluster, part in enumerate(topk_ids.flatten().long().tensor_split(12)):
        block_statistic[cluster] = torch.bincount(part, minlength=block_statistic.shape[1]).int()


@kernel
def moe_pre_sorted(
    x: Tensor,
    topk_index: Tensor,
    block_statistic: Tensor,
    moe_expand: Tensor,
    moe_index: Tensor,
    expert_m: Tensor,
    sorted_tokens_num_lod: Tensor,
) -> None:
    op = "moe_pre_sorted"
    experts = block_statistic.shape[1]
    _check_ids(op, topk_index, experts)
    dtype(op, _HALF, x=x, moe_expand=moe_expand)
    dtype(op, torch.int32, moe_index=moe_index, expert_m=expert_m, sorted_tokens_num_lod=sorted_tokens_num_lod)
    shape(op, "moe_expand", moe_expand, topk_index.numel(), x.shape[1])
    shape(op, "moe_index", moe_index, topk_index.numel())
    shape(op, "expert_m", expert_m, experts)
    shape(op, "sorted_tokens_num_lod", sorted_tokens_num_lod, experts + 1)
    contiguous(op, x=x, moe_expand=moe_expand)
    index, order, counts = _sort(topk_index, experts)
    expect(torch.equal(block_statistic.sum(0), counts), op, "block_statistic belongs to other ids")
    moe_expand.copy_(x[order // topk_index.shape[1]])
    moe_index.copy_(index)
    expert_m.copy_(counts)
    sorted_tokens_num_lod.copy_(functional.pad(counts.cumsum(0), (1, 0)))


@kernel
def moe_pre_small(
    topk_ids: Tensor, num_experts: int, index_have_neg: bool = False, sort_mode: bool = True, x: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    op = "moe_pre_small"
    _check_ids(op, topk_ids, num_experts)
    expect(sort_mode and x is not None, op, "only the sorting mode with x is emulated")
    assert x is not None
    dtype(op, _HALF, x=x)
    contiguous(op, x=x)
    index, order, counts = _sort(topk_ids, num_experts)
    return index.int(), functional.pad(counts.cumsum(0), (1, 0)).int(), x[order // topk_ids.shape[1]]


@kernel
def moe_fc(
    x: Tensor,
    weight: Tensor,
    sorted_tokens_num_lod: Tensor,
    sorted_tokens_idx: Tensor,
    moe_topk: int,
    y: Tensor,
    act: str | None = None,
    x_perchannel_max: Tensor | None = None,
    w_perchannel_max: Tensor | None = None,
    topk_ids: Any = None,
    topk_w: Any = None,
    bias: Any = None,
    tgemm_type: Any = None,
    tweight_type: Any = None,
    scale_n: int = 0,
    scale_k: int = 0,
    use_pack_int4: bool = False,
    sort_mode: bool = True,
) -> None:
    op = "moe_fc"
    expect(act is None, op, f"act={act!r} gives wrong results on the chip")
    dtype(op, torch.int32, sorted_tokens_num_lod=sorted_tokens_num_lod, sorted_tokens_idx=sorted_tokens_idx)
    dtype(op, _HALF, x=x, y=y)
    shape(op, "weight", weight, -1, -1, x.shape[1])
    shape(op, "y", y, x.shape[0] // moe_topk, moe_topk, weight.shape[1])
    shape(op, "sorted_tokens_idx", sorted_tokens_idx, x.shape[0])
    contiguous(op, x=x, weight=weight, y=y)
    lod = sorted_tokens_num_lod.tolist()
    expect(len(lod) == weight.shape[0] + 1 and lod[-1] <= x.shape[0], op, f"lod {lod}")
    rows = y.view(-1, weight.shape[1])
    for expert in range(weight.shape[0]):
        own = slice(lod[expert], lod[expert + 1])
        rows[own] = (x[own].float() @ weight[expert].float().T).to(y.dtype)


@kernel
def swiglu(x: Tensor, y: Tensor) -> None:
    op = "swiglu"
    contiguous(op, x=x, y=y)
    shape(op, "y", y, x.shape[0], x.shape[1] // 2)
    gate, up = x.float().chunk(2, 1)
    y.copy_(functional.silu(gate) * up)


@kernel
def moe_post(x: Tensor, moe_index: Tensor, normed_scale: Tensor, dequant_scale: Tensor, y: Tensor) -> None:
    op = "moe_post"
    dtype(op, torch.int32, moe_index=moe_index)
    dtype(op, torch.float32, normed_scale=normed_scale, dequant_scale=dequant_scale)
    dtype(op, _HALF, x=x, y=y)
    shape(op, "normed_scale", normed_scale, *moe_index.shape)
    shape(op, "dequant_scale", dequant_scale, *moe_index.shape)
    shape(op, "y", y, moe_index.shape[0], x.shape[1])
    contiguous(op, x=x, moe_index=moe_index, normed_scale=normed_scale, dequant_scale=dequant_scale, y=y)
    bad = (moe_index < 0) | (moe_index >= x.shape[0])
    expect(not bad.any(), op, "moe_index out of range")
    y.copy_((x[moe_index.long()].float() * (normed_scale * dequant_scale).unsqueeze(2)).sum(1))


@kernel
def m_grouped_gemm_bf16_bf16_bf16_nt_masked(
    lhs: Tensor, rhs: Tensor, out: Tensor, masked_m: Tensor, expected_m: int
) -> None:
    op = "m_grouped_gemm_bf16_bf16_bf16_nt_masked"
    dtype(op, torch.bfloat16, lhs=lhs, rhs=rhs, out=out)
    dtype(op, torch.int32, masked_m=masked_m)
    shape(op, "masked_m", masked_m, lhs.shape[0])
    shape(op, "rhs", rhs, lhs.shape[0], -1, lhs.shape[2])
    shape(op, "out", out, lhs.shape[0], lhs.shape[1], rhs.shape[1])
    contiguous(op, lhs=lhs, rhs=rhs, out=out, masked_m=masked_m)
    for expert, count in enumerate(masked_m.tolist()):
        out[expert, :count] = (lhs[expert, :count].float() @ rhs[expert].float().T).to(out.dtype)
