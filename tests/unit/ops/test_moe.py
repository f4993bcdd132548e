"""moe_dispatch, moe_expert_ffn and moe_combine on 1, 2 and 3 real gloo ranks; user-demand cases A10 and A11."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import baige_device
from baige_device.errors import CapacityError, ContractError
from baige_device.ops.moe_dispatch.contract import LAYOUTS, ExpertBatch
from baige_device.registry.table import OpTable
from baige_device.settings import Settings
from tests.unit.dist import run_ranks

EXPERTS, HIDDEN, INNER, K = 6, 10, 4, 3
TOKENS = {1: [[9], [0], [1]], 2: [[5, 4], [0, 3], [0, 0]], 3: [[2, 0, 6], [1, 1, 1], [0, 0, 0]]}


def make_tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator)
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :K]
    ids = ids.masked_fill(torch.rand(count, K, generator=generator) < 0.2, -1)
    ids[1:2] = -1  # a token without experts
    weights = torch.rand(count, K, generator=generator)
    return x, ids, weights.masked_fill(ids < 0, math.nan)  # weights of dropped choices must not matter


def make_experts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    return (
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator),
        torch.randn(EXPERTS, HIDDEN, INNER, generator=generator),
    )


def expected(x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> Tensor:
    """Token by token and expert by expert, in float64."""
    w13, w2 = (w.double() for w in make_experts())
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(K):
            expert = int(ids[t, j])
            if expert < 0:
                continue
            gate, up = w13[expert, :INNER] @ x[t].double(), w13[expert, INNER:] @ x[t].double()
            if activation == "silu":
                active = gate / (1 + torch.exp(-gate))
            else:
                active = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            out[t] += float(weights[t, j]) * (w2[expert] @ (active * up))
    return out


def check_batch(batch: ExpertBatch, tokens: list[tuple[Tensor, Tensor, Tensor]], rank: int, alignment: int) -> None:
    """The dispatched rows, listed from all ranks' inputs: order (source rank, token), padding zero."""
    local = EXPERTS // len(tokens)
    mine = range(rank * local, (rank + 1) * local)
    rows = [(x[t], ids[t].tolist(), w[t]) for x, ids, w in tokens for t in range(x.shape[0])]
    by_expert = [[x for x, ids, _ in rows if expert in ids] for expert in mine]
    assert batch.expert_counts.tolist() == [len(found) for found in by_expert]
    assert batch.expert_counts.dtype == torch.int32
    scales = batch.scales
    assert scales is not None
    if batch.layout == "flat":
        here = [row for row in rows if set(row[1]) & set(mine)]
        assert torch.equal(batch.x, torch.stack([x for x, _, _ in here]) if here else torch.zeros(0, HIDDEN))
        assert batch.topk_ids is not None
        assert batch.topk_ids.tolist() == [[i - mine[0] if i in mine else -1 for i in ids] for _, ids, _ in here]
        for row, (x, ids, weights) in enumerate(here):
            assert torch.equal(scales[row], 2 * x[:2])
            held = [weight for i, weight in zip(ids, weights.tolist(), strict=True) if i in mine]
            assert batch.topk_weights[row][batch.topk_ids[row] >= 0].tolist() == held  # type: ignore[index]
        return
    padded = torch.zeros_like(batch.x)
    for e, found in enumerate(by_expert):
        target = padded[e] if batch.layout == "masked" else padded[int(batch.expert_starts[e]) :]  # type: ignore[index]
        for i, x in enumerate(found):
            target[i] = x
    assert torch.equal(batch.x, padded)
    assert torch.equal(scales, 2 * padded[..., :2])
    if batch.expert_starts is not None:
        starts = batch.expert_starts.tolist()
        assert starts == [sum(-(-len(f) // alignment) * alignment for f in by_expert[:e]) for e in range(local + 1)]
        assert batch.x.shape[0] == starts[-1]


def moe_worker(ranks: int) -> None:
    ops = baige_device.activate(Settings(backend="reference", checks="values")).ops
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    local = EXPERTS // ranks
    w13, w2 = (w[rank * local : (rank + 1) * local] for w in make_experts())
    for counts in TOKENS[ranks]:
        tokens = [make_tokens(count, seed) for seed, count in enumerate(counts)]
        x, ids, weights = tokens[rank]
        for layout in LAYOUTS:
            for activation in ("silu", "gelu"):
                batch = ops.moe_dispatch(
                    x, ids, weights, num_experts=EXPERTS, layout=layout, max_tokens_per_rank=9, alignment=4
                )
                y = ops.moe_expert_ffn(batch, w13, w2, activation=activation)
                out = torch.full_like(x, 123456.0)
                ops.moe_combine(y, batch, out=out)
                wanted = expected(x, ids, weights, activation)
                torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-4)
            scaled = ops.moe_dispatch(
                x,
                ids.int(),
                weights,
                num_experts=EXPERTS,
                layout=layout,
                max_tokens_per_rank=9,
                alignment=4,
                x_scales=2 * x[:, :2],
            )
            check_batch(scaled, tokens, rank, 4)
            for dtype in (torch.float8_e4m3fn, torch.int8, torch.bfloat16):
                cast = ops.moe_dispatch(
                    x.to(dtype), ids, weights, num_experts=EXPERTS, layout=layout, max_tokens_per_rank=9, alignment=4
                )
                assert cast.x.dtype == dtype
                assert torch.equal(cast.x.float(), scaled.x.to(dtype).float())


@pytest.mark.parametrize("ranks", [2, 3])
def test_layouts_over_ranks(ranks: int) -> None:
    run_ranks(ranks, moe_worker, ranks)


def test_layouts_on_one_rank() -> None:
    moe_worker(1)


def capacity_worker() -> list[str]:
    ops = baige_device.activate(Settings(backend="reference")).ops
    rank = torch.distributed.get_rank()
    options: dict[str, Any] = {"num_experts": EXPERTS, "layout": "flat"}
    messages = []
    for tokens, capacities in (([2, 6], [5, 5]), ([2, 2], [128, 256])):
        with pytest.raises(CapacityError) as raised:
            ops.moe_dispatch(*make_tokens(tokens[rank], 0), max_tokens_per_rank=capacities[rank], **options)
        messages.append(str(raised.value))
    batch = ops.moe_dispatch(*make_tokens(5, 0), max_tokens_per_rank=5, **options)  # the group still works
    ops.moe_combine(batch.x, batch)
    return messages


def test_capacity_is_refused_on_all_ranks_alike() -> None:
    wanted = [
        "moe_dispatch: x.shape[0]: expected at most max_tokens_per_rank = 5, got 6 tokens on rank 1",
        "moe_dispatch: max_tokens_per_rank: expected 128 (as on rank 0) on all ranks, got 256 on rank 1",
    ]
    assert run_ranks(2, capacity_worker) == [wanted, wanted]


def bad_ids_worker() -> list[str]:
    ops = baige_device.activate(Settings(backend="reference", checks="values")).ops
    x, ids, weights = make_tokens(4, 0)
    messages = []
    for bad_ranks in ([1], [0, 1], []):
        changed = ids.clone()
        if torch.distributed.get_rank() in bad_ranks:
            changed[3, 0] = EXPERTS + torch.distributed.get_rank()
        try:
            batch = ops.moe_dispatch(x, changed, weights, num_experts=EXPERTS, layout="flat", max_tokens_per_rank=4)
            ops.moe_combine(batch.x, batch)
        except ContractError as error:
            messages.append(str(error))
    return messages


def test_bad_values_of_one_rank_are_refused_on_all_ranks_alike() -> None:
    wanted = f"moe_dispatch: topk_ids[3, 0]: expected -1 or an index in [0, {EXPERTS}), got"
    messages = [f"{wanted} {EXPERTS + 1} on rank 1", f"{wanted} {EXPERTS} on rank 0"]
    assert run_ranks(2, bad_ids_worker) == [messages, messages]


def test_capacity_on_one_rank(ops: OpTable) -> None:
    with pytest.raises(CapacityError, match="expected at most max_tokens_per_rank = 128, got 129 tokens on rank 0"):
        ops.moe_dispatch(*make_tokens(129, 0), num_experts=EXPERTS, layout="flat", max_tokens_per_rank=128)


@pytest.mark.parametrize("layout", ["expert_major", "masked"])
def test_padding_is_never_read(ops: OpTable, layout: str) -> None:
    batch = ops.moe_dispatch(*make_tokens(7, 3), num_experts=EXPERTS, layout=layout, max_tokens_per_rank=7, alignment=8)
    y = torch.where(batch.x.eq(0).all(-1, keepdim=True), math.nan, batch.x)
    assert ops.moe_combine(y, batch).isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tokens_and_one_id_named_twice(ops: OpTable, layout: str) -> None:
    x = torch.randn(4, 2 * HIDDEN)[:, :HIDDEN]
    ids, weights = torch.tensor([[2, 2, 5]] * 4), torch.rand(4, 3)
    batch = ops.moe_dispatch(x, ids, weights, num_experts=EXPERTS, layout=layout, max_tokens_per_rank=4)
    out = ops.moe_combine(ops.moe_expert_ffn(batch, *make_experts()), batch)
    torch.testing.assert_close(out.double(), expected(x, ids, weights, "silu"), rtol=2e-5, atol=2e-4)


def test_combine_refuses_another_token_count(ops: OpTable) -> None:
    batch = ops.moe_dispatch(*make_tokens(4, 0), num_experts=EXPERTS, layout="flat", max_tokens_per_rank=4)
    with pytest.raises(ContractError, match=r"out.shape\[0\]: expected 4 dispatched tokens, got 3"):
        ops.moe_combine(batch.x, batch, out=torch.zeros(3, HIDDEN))
