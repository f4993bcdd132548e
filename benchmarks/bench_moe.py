"""MoE permute and unpermute on one rank: DeepSeek-V3's shape, 256 experts, top-8, hidden size 7168."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baige_device.backends.portable.moe_combine import moe_combine
from baige_device.backends.portable.moe_dispatch import moe_dispatch
from baige_device.cli.bench_case import BenchCase
from baige_device.ops.moe_dispatch.contract import ExpertBatch

OPS = ("moe_dispatch", "moe_combine")

_EXPERTS, _TOPK, _HIDDEN = 256, 8, 7168


def cases() -> Iterator[BenchCase]:
    """Dispatch, combine and both, expert-major, at 128 and 4096 tokens."""
    torch.manual_seed(0)
    for tokens in (128, 4096):
        x = torch.randn(tokens, _HIDDEN, device="cuda").bfloat16()
        weights = torch.rand(tokens, _TOPK, device="cuda")
        ids = torch.rand(tokens, _EXPERTS, device="cuda").topk(_TOPK).indices.int()
        yield from _one_size(x, ids, weights)


def _one_size(x: Tensor, ids: Tensor, weights: Tensor) -> Iterator[BenchCase]:
    tokens = x.shape[0]
    out = torch.empty_like(x)
    batch = _dispatch(x, ids, weights)
    moved = x.numel() * x.element_size() * (1 + _TOPK)

    def verify() -> None:
        fresh = _dispatch(x, ids, weights)
        want = x.double() * weights.double().sum(1, keepdim=True)
        got = moe_combine(fresh.x, fresh, out=out.fill_(float("nan")))
        error = ((got.double() - want).abs() / (1 + want.abs())).max().item()
        assert error < 1e-2, f"error {error:.1e}, limit 1e-2"

    def both(_: int) -> object:
        fresh = _dispatch(x, ids, weights)
        return moe_combine(fresh.x, fresh, out=out)

    facts = {"batch": tokens, "row_bytes": 2 * _HIDDEN}
    runs = {
        "moe_dispatch": (f"permute T {tokens}", lambda _: _dispatch(x, ids, weights), moved),
        "moe_combine": (f"unpermute T {tokens}", lambda _: moe_combine(batch.x, batch, out=out), moved),
    }
    for op, (name, run, work) in runs.items():
        yield BenchCase(op, name, run, verify, work, "copy", tier="portable", facts=facts)
    yield BenchCase(
        "moe_combine", f"permute + unpermute T {tokens}", both, verify, 2 * moved, "copy", tier="portable", facts=facts
    )


def _dispatch(x: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
    return moe_dispatch(x, ids, weights, num_experts=_EXPERTS, layout="expert_major", max_tokens_per_rank=x.shape[0])
