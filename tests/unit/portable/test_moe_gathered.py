"""The portable MoE transport that a graph captures, between two real gloo ranks, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; run these tests in the vLLM environment")

from baige_device.ops.moe_dispatch.contract import LAYOUTS
from tests.unit.dist import run_ranks

EXPERTS, TOPK, HIDDEN, CAPACITY = 4, 2, 24, 3
CASES = [*(([2, 3], layout) for layout in LAYOUTS), ([0, 1], "flat")]
"""(tokens by rank, layout); few, because Triton's interpreter is slow."""


def worst_errors() -> list[float]:
    """Dispatch to experts that give back what they get, and combine: x times the sum of its weights comes home."""
    import torch.distributed as dist

    from baige_device.backends.portable.moe_combine import moe_combine
    from baige_device.backends.portable.moe_dispatch import moe_dispatch
    from baige_device.backends.portable.moe_transport import force_transport

    force_transport(None, "all_gather")
    rank = dist.get_rank()
    errors = []
    for counts, layout in CASES:
        generator = torch.Generator().manual_seed(5 + rank)
        x = torch.randn(counts[rank], HIDDEN, generator=generator)
        ids = torch.rand(counts[rank], EXPERTS, generator=generator).topk(TOPK).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
        weights = torch.rand(ids.shape, generator=generator)
        weights[ids < 0] = float("nan")
        batch = moe_dispatch(x, ids, weights, num_experts=EXPERTS, layout=layout, max_tokens_per_rank=CAPACITY)
        y = batch.x
        if batch.topk_weights is not None:
            y = y * batch.topk_weights.sum(1, keepdim=True)
        want = x * torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        got = moe_combine(y, batch, out=torch.full_like(x, float("nan")))
        errors.append(float((got - want).abs().max()) if x.numel() else 0.0)
    return errors


def chosen_ways() -> list[str]:
    """The transport by the rule, for bytes up to the bound of two ranks and for one token more."""
    from baige_device.backends.portable import moe_transport

    moe_transport.force_transport(None, None)
    moe_transport.PAIR_GATHERS_UP_TO_BYTES = 64
    x, ids, weights = torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    ways = [moe_transport.send(x, ids, weights, None, 1, tokens, None).way for tokens in (2, 3)]
    return [type(way).__name__ for way in ways]


def one_rank() -> tuple[list[float], list[str]]:
    return worst_errors(), chosen_ways()


def test_rows_come_home_and_many_bytes_go_only_where_they_are_wanted() -> None:
    for errors, ways in run_ranks(2, one_rank):
        assert max(errors) < 1e-5
        assert ways == ["_AllGather", "_AllToAll"]
