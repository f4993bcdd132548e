"""MoE between processes: every transport and layout, fp8 payloads, random delays, and a graph over changing tokens."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baige_device.backends.portable.moe_combine import moe_combine
from baige_device.backends.portable.moe_dispatch import moe_dispatch
from baige_device.backends.portable.moe_transport import force_transport
from baige_device.ops.moe_dispatch.contract import LAYOUTS, ExpertBatch
from tests.device.gpu import needs_gpu
from tests.device.ranks import run_ranks

pytestmark = [needs_gpu, pytest.mark.device]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")
needs_deep_ep = pytest.mark.skipif(importlib.util.find_spec("deep_ep_cpp") is None, reason="needs DeepEP 1.x")

HIDDEN, EXPERTS_A_RANK, TOPK, CAPACITY = 512, 8, 4, 96


@dataclass(frozen=True)
class Tokens:
    x: Tensor
    ids: Tensor
    weights: Tensor

    def share(self) -> Tensor:
        """Sum of the weights of the choices that take part."""
        return torch.where(self.ids >= 0, self.weights, 0.0).sum(1, keepdim=True)


def draw(count: int, size: int, salt: int) -> Tokens:
    generator = torch.Generator().manual_seed(salt)
    ids = torch.rand(count, EXPERTS_A_RANK * size, generator=generator).topk(TOPK).indices.int()
    ids[torch.rand(count, TOPK, generator=generator) < 0.2] = -1
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    return Tokens(x.cuda(), ids.cuda(), torch.rand(count, TOPK, generator=generator).cuda())


def pause(salt: int) -> None:
    time.sleep(random.Random(salt).random() * 0.01)


def answer(batch: ExpertBatch) -> Tensor:
    """Experts that give back what they get: weighted already in `flat`, unweighted else."""
    x = batch.x
    if batch.scales is not None:
        x = (x.float() * batch.scales.repeat_interleave(128, -1)).bfloat16()
    if batch.topk_weights is None:
        return x
    assert batch.topk_ids is not None
    return (x.float() * torch.where(batch.topk_ids >= 0, batch.topk_weights, 0.0).sum(1, keepdim=True)).bfloat16()


def travel(tokens: Tokens, dispatch: Callable[..., ExpertBatch], size: int, layout: str, fp8: bool) -> None:
    x, scales = tokens.x, None
    if fp8:
        scales = x.float().view(len(x), x.shape[1] // 128, 128).abs().amax(2) / 448 + 1e-9
        x = (x.float() / scales.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    batch = dispatch(
        x,
        tokens.ids,
        tokens.weights,
        num_experts=EXPERTS_A_RANK * size,
        layout=layout,
        max_tokens_per_rank=CAPACITY,
        x_scales=scales,
    )
    out = torch.full_like(tokens.x, float("nan"))
    got = moe_combine(answer(batch), batch, out=out).float()
    sent = tokens.x.float() if scales is None else x.float() * scales.repeat_interleave(128, 1)
    want = sent * tokens.share()
    assert bool(((got - want).abs() <= 0.02 * want.abs() + 0.02).all()), (layout, fp8, (got - want).abs().max())


def dispatcher(rank: int, transport: str) -> Callable[..., ExpertBatch]:
    if transport == "deep_ep":
        from baige_device.backends.cuda.moe_deep_ep import moe_dispatch as deep_ep_dispatch

        return deep_ep_dispatch
    force_transport(None, transport)  # type: ignore[arg-type]
    return moe_dispatch


def travel_under_delays(rank: int, size: int, transport: str) -> None:
    dispatch = dispatcher(rank, transport)
    counts = [CAPACITY, 0, 1, 37, 64, 5]
    for step in range(12):
        tokens = draw(counts[(step + 2 * rank) % len(counts)], size, 100 * step + rank)
        for layout in LAYOUTS:
            pause(7 * step + rank)
            travel(tokens, dispatch, size, layout, fp8=step % 2 == 1)


def travel_in_graph(rank: int, size: int, transport: str) -> None:
    """Captured once, replayed with other tokens and other choices."""
    dispatch = dispatcher(rank, transport)
    for layout in LAYOUTS:
        tokens = draw(40, size, rank)
        out = torch.empty_like(tokens.x)

        def step(layout: str = layout, tokens: Tokens = tokens, out: Tensor = out) -> None:
            batch = dispatch(
                tokens.x,
                tokens.ids,
                tokens.weights,
                num_experts=EXPERTS_A_RANK * size,
                layout=layout,
                max_tokens_per_rank=CAPACITY,
            )
            moe_combine(answer(batch), batch, out=out)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for round_ in range(5):
            fresh = draw(40, size, 1000 + 10 * round_ + rank)
            for name in ("x", "ids", "weights"):
                getattr(tokens, name).copy_(getattr(fresh, name))
            pause(round_ + rank)
            out.fill_(float("nan"))
            graph.replay()
            want = fresh.x.float() * fresh.share()
            assert bool(((out.float() - want).abs() <= 0.02 * want.abs() + 0.02).all()), (layout, round_)


def everything(rank: int, size: int, transport: str, works: tuple[str, ...]) -> None:
    for work in works:
        globals()[work](rank, size, transport)


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_two_processes_on_one_gpu(transport: str) -> None:
    run_ranks(travel_under_delays, 2, transport, share_device=True, shared_backend="gloo")


@needs_two
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_two_gpus(transport: str) -> None:
    run_ranks(everything, 2, transport, ("travel_under_delays", "travel_in_graph"))


@needs_two
@needs_deep_ep
def test_two_gpus_through_deep_ep() -> None:
    run_ranks(everything, 2, "deep_ep", ("travel_under_delays", "travel_in_graph"))
