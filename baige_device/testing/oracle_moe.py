"""Routing worked out with Python lists: which rows each rank's experts must receive, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.testing.checks import check_equal, check_list, expect
from baige_device.testing.lab import Lab

__all__ = ["Row", "World", "expert_rows", "flat_rows", "live_places", "make_world", "verify_dispatch"]

Row = tuple[int, int]
"""(source rank, token)"""


@dataclass(frozen=True)
class World:
    """The input of every rank, which each rank draws for itself from the common seed (CPU tensors)."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    scales: list[Tensor] | None
    num_experts: int
    max_tokens: int

    @property
    def size(self) -> int:
        return len(self.x)

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.size


def make_world(
    lab: Lab,
    tokens: list[int],
    *,
    num_experts: int,
    topk: int,
    hidden: int,
    dtype: torch.dtype,
    pattern: str = "random",
    scale_blocks: int = 0,
) -> World:
    """Draw all ranks' tokens. Every row of x is distinct, so that a misplaced row is noticed.

    Patterns: `random`, `one-expert` (all tokens on expert 1), `half-minus` (the weights of those are NaN),
    `all-minus`, `few-experts` (most experts get nothing).
    """
    x, ids, weights, scales = [], [], [], []
    for rank, count in enumerate(tokens):
        generator = lab.generator(rank)
        if dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
            payload = torch.randint(0, 120, (count, hidden), generator=generator, dtype=torch.uint8).view(dtype)
        else:
            payload = torch.randn(count, hidden, generator=generator).to(dtype)
        x.append(payload)
        ids.append(_ids(count, topk, num_experts, pattern, generator))
        gates = torch.rand(count, topk, generator=generator) + 0.05
        weights.append(torch.where(ids[-1] >= 0, gates, float("nan")) if pattern == "half-minus" else gates)
        scales.append(torch.rand(count, scale_blocks, generator=generator) + 0.5)
    return World(x, ids, weights, scales if scale_blocks else None, num_experts, max(tokens, default=0) + 2)


def _ids(count: int, topk: int, num_experts: int, pattern: str, generator: torch.Generator) -> Tensor:
    reachable = min(num_experts, topk + 1) if pattern == "few-experts" else num_experts
    ids = torch.stack([torch.randperm(reachable, generator=generator)[:topk] for _ in range(count)]) if count else None
    found = torch.empty(0, topk, dtype=torch.int64) if ids is None else ids
    if pattern == "one-expert":
        found = torch.full_like(found, -1)
        found[:, 0] = 1 % num_experts
    elif pattern == "half-minus":
        found = torch.where(torch.rand(found.shape, generator=generator) < 0.5, -1, found)
    elif pattern == "all-minus":
        found = torch.full_like(found, -1)
    return found


def expert_rows(world: World, rank: int) -> list[list[Row]]:
    """For each local expert of a rank: the (source rank, token) rows that it receives, in order."""
    first = rank * world.local_experts
    found: list[list[Row]] = [[] for _ in range(world.local_experts)]
    for source, ids in enumerate(world.ids):
        for token, chosen in enumerate(ids.tolist()):
            for expert in chosen:
                if first <= expert < first + world.local_experts:
                    found[expert - first].append((source, token))
    return found


def flat_rows(world: World, rank: int) -> list[Row]:
    """The rows of a rank in the flat layout: each token with an expert here, once, in order."""
    first = rank * world.local_experts
    local = range(first, first + world.local_experts)
    return [
        (source, token)
        for source, ids in enumerate(world.ids)
        for token, chosen in enumerate(ids.tolist())
        if any(expert in local for expert in chosen)
    ]


def live_places(world: World, rank: int, batch: ExpertBatch) -> list[tuple[Any, Row, int]]:
    """(index into batch.x, its row, local expert or -1 for flat) for every row that is not padding."""
    places: list[tuple[Any, Row, int]] = []
    if batch.layout == "flat":
        assert batch.topk_ids is not None
        live = [place for place, ids in enumerate(batch.topk_ids.tolist()) if any(expert >= 0 for expert in ids)]
        rows = flat_rows(world, rank)
        expect(len(live) == len(rows), f"x: expected {len(rows)} rows with a local expert, got {len(live)}")
        return [(place, row, -1) for place, row in zip(live, rows, strict=True)]
    for expert, rows in enumerate(expert_rows(world, rank)):
        for number, row in enumerate(rows):
            if batch.layout == "masked":
                places.append(((expert, number), row, expert))
            else:
                assert batch.expert_starts is not None
                places.append((int(batch.expert_starts[expert]) + number, row, expert))
    return places


def verify_dispatch(world: World, rank: int, layout: str, alignment: int, batch: ExpertBatch) -> None:
    """Everything that a rank received, bit for bit: counts, starts, order, payload, scales, padding."""
    expect(isinstance(batch, ExpertBatch), f"result: expected an ExpertBatch, got {type(batch).__name__}")
    rows = expert_rows(world, rank)
    expect(batch.layout == layout, f"layout: expected {layout!r}, got {batch.layout!r}")
    expect(batch.expert_counts.dtype == torch.int32, f"expert_counts.dtype: got {batch.expert_counts.dtype}")
    counts, want = batch.expert_counts.tolist(), [len(found) for found in rows]
    check_list("expert_counts", counts, want)
    _check_frame(world, rank, layout, alignment, batch, want)
    x, scales = batch.x.cpu(), None if batch.scales is None else batch.scales.cpu()
    expect((scales is None) == (world.scales is None), "scales: expected exactly when x_scales was given")
    padding = torch.ones(x.shape[:-1], dtype=torch.bool)
    for place, (source, token), _ in live_places(world, rank, batch):
        check_equal(f"x[{place}] (rank {source}, token {token})", _raw(x[place]), _raw(world.x[source][token]))
        padding[place] = False
        if scales is not None and world.scales is not None:
            check_equal(f"scales[{place}]", scales[place], world.scales[source][token])
    if layout != "flat":
        expect(not bool(_raw(x[padding]).any()), "x: padding rows are not zero")


def _check_frame(world: World, rank: int, layout: str, alignment: int, batch: ExpertBatch, counts: list[int]) -> None:
    hidden = world.x[0].shape[1]
    expect(batch.x.dtype == world.x[0].dtype, f"x.dtype: expected {world.x[0].dtype}, got {batch.x.dtype}")
    expect(batch.x.is_contiguous(), "x: expected contiguous")
    if layout == "masked":
        shape = (world.local_experts, world.max_tokens * world.size, hidden)
        expect(tuple(batch.x.shape) == shape, f"x.shape: expected {list(shape)}, got {list(batch.x.shape)}")
    else:
        expect(
            batch.x.dim() == 2 and batch.x.shape[1] == hidden,
            f"x.shape: expected [R, {hidden}], got {list(batch.x.shape)}",
        )
    if layout == "expert_major":
        _check_starts(alignment, batch, counts)
    else:
        expect(batch.expert_starts is None, f"expert_starts: expected None in the {layout} layout")
    if layout == "flat":
        _check_flat_routing(world, rank, batch)
    else:
        expect(batch.topk_ids is None and batch.topk_weights is None, f"topk_ids: expected None in the {layout} layout")


def _check_starts(alignment: int, batch: ExpertBatch, counts: list[int]) -> None:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count // alignment) * alignment)
    expect(batch.expert_starts is not None, "expert_starts: expected int32 [E+1], got None")
    assert batch.expert_starts is not None
    got = batch.expert_starts.tolist()
    expect(batch.expert_starts.dtype == torch.int32, f"expert_starts.dtype: got {batch.expert_starts.dtype}")
    check_list("expert_starts", got, starts)
    expect(batch.x.shape[0] >= starts[-1], f"x.shape[0]: expected at least {starts[-1]}, got {batch.x.shape[0]}")


def _check_flat_routing(world: World, rank: int, batch: ExpertBatch) -> None:
    expect(batch.topk_ids is not None and batch.topk_weights is not None, "topk_ids, topk_weights: expected in flat")
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    expect(batch.topk_ids.dtype == torch.int32, f"topk_ids.dtype: expected int32, got {batch.topk_ids.dtype}")
    expect(batch.topk_weights.dtype == torch.float32, f"topk_weights.dtype: got {batch.topk_weights.dtype}")
    expect(batch.topk_ids.shape[0] == batch.x.shape[0], f"topk_ids.shape[0]: expected {batch.x.shape[0]} rows")
    first = rank * world.local_experts
    for place, (source, token), _ in live_places(world, rank, batch):
        want = {}
        for expert, weight in zip(
            world.ids[source][token].tolist(), world.weights[source][token].tolist(), strict=True
        ):
            if first <= expert < first + world.local_experts:
                want[expert - first] = weight
        pairs = zip(batch.topk_ids[place].tolist(), batch.topk_weights[place].tolist(), strict=True)
        got = {expert: weight for expert, weight in pairs if expert != -1}
        expect(got == want, f"topk of row {place} (rank {source}, token {token}): expected {want}, got {got}")


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
