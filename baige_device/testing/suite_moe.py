"""Cases of `moe_dispatch` and `moe_combine`: every layout, one rank and many, against routing by Python lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.errors import CapacityError
from baige_device.ops.moe_dispatch.contract import LAYOUTS, ExpertBatch
from baige_device.testing.cases import Case, bad_inputs
from baige_device.testing.checks import check_close, check_untouched, expect, twins
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_moe import World, live_places, make_world, verify_dispatch
from baige_device.testing.tolerances import limit

__all__ = ["cases", "rank_cases"]

DISPATCH, COMBINE = "moe_dispatch", "moe_combine"
RANKS = frozenset({"ranks"})


@dataclass(frozen=True)
class Moe:
    """One point of the matrix. `tokens(rank, size)` says how many tokens a rank brings."""

    layout: str
    tokens: Callable[[int, int], int] = lambda rank, size: 33
    experts_per_rank: int = 8
    topk: int = 4
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    pattern: str = "random"
    alignment: int = 1
    scale_blocks: int = 0
    ids_layout: str = "contiguous"

    @property
    def params(self) -> dict[str, Any]:
        found = {
            "dtype": dtype_name(self.dtype),
            "index_dtype": dtype_name(self.index_dtype),
            "layout": self.layout,
            "topk": self.topk,
            "hidden_size": self.hidden,
        }
        if self.scale_blocks:
            found["scale_blocks"] = self.scale_blocks
        return {**found, "alignment": self.alignment} if self.alignment > 1 else found

    @property
    def answer_dtype(self) -> torch.dtype:
        """What the experts answer in: int8 is a payload only."""
        return torch.bfloat16 if self.dtype is torch.int8 else self.dtype


def cases() -> list[Case]:
    one = {"ranks": 1}
    found: list[Case] = []
    for layout in LAYOUTS:
        for name, point in _matrix(Moe(layout)):
            params = {**point.params, **one, "num_experts": point.experts_per_rank}
            found.append(Case(DISPATCH, f"{layout}-{name}", partial(_dispatch_case, point), params))
        for name, point in _combine_matrix(Moe(layout)):
            params = {**point.params, **one, "num_experts": point.experts_per_rank}
            found.append(Case(COMBINE, f"{layout}-{name}", partial(_combine_case, point, True), params, (DISPATCH,)))
        point = Moe(layout)
        params = {**point.params, **one}
        found.append(
            Case(COMBINE, f"{layout}-result-allocated", partial(_combine_case, point, False), params, (DISPATCH,))
        )
        found.append(Case(DISPATCH, f"{layout}-over-capacity", partial(_over_capacity, point), params))
        found.append(
            Case(
                COMBINE,
                f"{layout}-bad-inputs",
                partial(_bad_combine, point),
                params,
                (DISPATCH,),
                frozenset({"checked"}),
            )
        )
    found.append(_bad_dispatch())
    return found


def rank_cases() -> list[Case]:
    uneven: dict[str, Callable[[int, int], int]] = {
        "even": lambda rank, size: 17,
        "uneven": lambda rank, size: 5 + 13 * rank,
        "first-empty": lambda rank, size: 0 if rank == 0 else 20,
        "last-empty": lambda rank, size: 0 if rank == size - 1 else 20,
        "all-empty": lambda rank, size: 0,
    }
    found: list[Case] = []
    for layout in LAYOUTS:
        points = {name: Moe(layout, tokens=tokens, experts_per_rank=4) for name, tokens in uneven.items()}
        base = points["uneven"]
        points["one-expert"] = replace(base, pattern="one-expert")
        points["half-minus"] = replace(base, pattern="half-minus")
        points["all-minus"] = replace(base, pattern="all-minus")
        points["float32"] = replace(base, dtype=torch.float32)
        if layout == "expert_major":
            points["aligned"] = replace(base, alignment=16)
        for name, point in points.items():
            case = f"ranks-{layout}-{name}"
            found.append(Case(DISPATCH, case, partial(_dispatch_case, point), point.params, tags=RANKS))
            found.append(Case(COMBINE, case, partial(_combine_case, point, True), point.params, (DISPATCH,), RANKS))
        int8 = replace(base, dtype=torch.int8, scale_blocks=1)
        for name, point in (("int8", int8), ("int8-half-minus", replace(int8, pattern="half-minus"))):
            case = f"ranks-{layout}-{name}"
            found.append(Case(DISPATCH, case, partial(_dispatch_case, point), point.params, tags=RANKS))
            found.append(Case(COMBINE, case, partial(_combine_case, point, True), point.params, (DISPATCH,), RANKS))
        scaled = replace(base, dtype=torch.float8_e4m3fn, scale_blocks=2)
        found.append(
            Case(DISPATCH, f"ranks-{layout}-scaled", partial(_dispatch_case, scaled), scaled.params, tags=RANKS)
        )
        found += [
            Case(DISPATCH, f"ranks-{layout}-{name}", partial(run, base), base.params, tags=RANKS)
            for name, run in (("over-capacity", _over_capacity), ("capacities-differ", _capacities_differ))
        ]
    return found


def _matrix(base: Moe) -> list[tuple[str, Moe]]:
    found = [
        (f"tokens-{tokens}", replace(base, tokens=partial(_constant, tokens))) for tokens in (0, 1, 2, 127, 128, 129)
    ]
    payloads = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8)
    found += [(f"dtype-{dtype_name(dtype)}", replace(base, dtype=dtype)) for dtype in payloads]
    found += [
        (pattern, replace(base, pattern=pattern))
        for pattern in ("one-expert", "half-minus", "all-minus", "few-experts")
    ]
    found += [(f"hidden-{hidden}", replace(base, hidden=hidden)) for hidden in (1, 7, 576)]
    found += [
        (f"topk-{topk}-of-{experts}", replace(base, topk=topk, experts_per_rank=experts))
        for topk, experts in ((1, 1), (1, 8), (8, 8), (8, 64))
    ]
    if base.layout == "expert_major":
        found += [(f"alignment-{alignment}", replace(base, alignment=alignment)) for alignment in (8, 128)]
        empty = replace(base, alignment=8, tokens=lambda rank, size: 0)
        found += [
            ("alignment-8-empty", empty),
            ("alignment-8-one-expert", replace(base, alignment=8, pattern="one-expert")),
        ]
    return [
        *found,
        ("scaled-fp8", replace(base, dtype=torch.float8_e4m3fn, scale_blocks=2)),
        ("scaled-int8", replace(base, dtype=torch.int8, scale_blocks=1, pattern="half-minus")),
        ("int64-ids", replace(base, index_dtype=torch.int64)),
        ("ids-transposed", replace(base, ids_layout="transposed")),
    ]


def _constant(value: int, rank: int, size: int) -> int:
    return value


def _combine_matrix(base: Moe) -> list[tuple[str, Moe]]:
    skipped = ("dtype-float8_e4m3fn", "dtype-int8", "dtype-uint8", "scaled-fp8", "scaled-int8")
    return [(name, point) for name, point in _matrix(base) if name not in skipped]


def _world(point: Moe, lab: Lab) -> World:
    return make_world(
        lab,
        [point.tokens(rank, lab.size) for rank in range(lab.size)],
        num_experts=point.experts_per_rank * lab.size,
        topk=min(point.topk, point.experts_per_rank * lab.size),
        hidden=point.hidden,
        dtype=point.dtype,
        pattern=point.pattern,
        scale_blocks=point.scale_blocks,
    )


def _arguments(point: Moe, lab: Lab, world: World) -> dict[str, Any]:
    ids = world.ids[lab.rank].to(point.index_dtype).to(lab.device)
    if point.ids_layout == "transposed":
        ids = ids.t().contiguous().t()
    scales = None if world.scales is None else world.scales[lab.rank].to(lab.device)
    return {
        "x": world.x[lab.rank].to(lab.device),
        "topk_ids": ids,
        "topk_weights": world.weights[lab.rank].to(lab.device),
        "num_experts": world.num_experts,
        "layout": point.layout,
        "max_tokens_per_rank": world.max_tokens,
        "group": lab.group,
        "alignment": point.alignment,
        "x_scales": scales,
    }


def _dispatch(point: Moe, lab: Lab, world: World) -> ExpertBatch:
    args = _arguments(point, lab, world)
    before = twins(args)
    lab.pause()
    batch: ExpertBatch = lab.ops.moe_dispatch(**args)
    lab.synchronize()
    check_untouched(args, before, ())
    return batch


def _dispatch_case(point: Moe, lab: Lab) -> float:
    world = _world(point, lab)
    verify_dispatch(world, lab.rank, point.layout, point.alignment, _dispatch(point, lab, world))
    return 0.0


def _combine_case(point: Moe, given_out: bool, lab: Lab) -> float:
    world = _world(point, lab)
    batch = _dispatch(point, lab, world)
    verify_dispatch(world, lab.rank, point.layout, point.alignment, batch)
    answers = _answers(point, lab, world)
    y = torch.full(batch.x.shape, float("nan"), dtype=point.answer_dtype)
    for place, (source, token), expert in live_places(world, lab.rank, batch):
        y[place] = answers[source][token, lab.rank if expert < 0 else lab.rank * world.local_experts + expert]
    args: dict[str, Any] = {"y": y.to(lab.device), "batch": batch}
    if given_out:
        args["out"] = lab.out((world.x[lab.rank].shape[0], point.hidden), point.answer_dtype)
    before = twins(args)
    lab.pause()
    got = lab.ops.moe_combine(**args)
    lab.synchronize()
    check_untouched(args, before, ("out",))
    expect(not given_out or got.data_ptr() == args["out"].data_ptr(), "result: expected the buffer given as out")
    expect(got.dtype == point.answer_dtype, f"result.dtype: expected {point.answer_dtype}, got {got.dtype}")
    kind = "combine" if lab.size == 1 else "combine_ranks"
    return check_close("result", got, _combined(point, lab.rank, world, answers), limit(kind, point.answer_dtype))


def _answers(point: Moe, lab: Lab, world: World) -> list[Tensor]:
    """What each (token, expert) answers; in the flat layout what each (token, rank) answers."""
    columns = world.size if point.layout == "flat" else world.num_experts
    return [
        torch.randn(x.shape[0], columns, point.hidden, generator=lab.generator(100 + rank)).to(point.answer_dtype)
        for rank, x in enumerate(world.x)
    ]


def _combined(point: Moe, rank: int, world: World, answers: list[Tensor]) -> Tensor:
    want = torch.zeros(world.x[rank].shape[0], point.hidden, dtype=torch.float64)
    for token, chosen in enumerate(world.ids[rank].tolist()):
        live = [(expert, place) for place, expert in enumerate(chosen) if expert >= 0]
        if point.layout == "flat":
            for owner in sorted({expert // world.local_experts for expert, _ in live}):
                want[token] += answers[rank][token, owner].double()
        else:
            for expert, place in live:
                want[token] += world.weights[rank][token, place].double() * answers[rank][token, expert].double()
    return want


def _over_capacity(point: Moe, lab: Lab) -> float:
    """One rank brings a token too many: CapacityError on every rank, and the group still works afterwards."""
    world = _world(point, lab)
    args = _arguments(point, lab, world)
    args["max_tokens_per_rank"] = max(x.shape[0] for x in world.x) - 1
    _expect_capacity_error(lab, args)
    verify_dispatch(world, lab.rank, point.layout, point.alignment, _dispatch(point, lab, world))
    return 0.0


def _capacities_differ(point: Moe, lab: Lab) -> float:
    """Ranks disagree on the maximum, each with room for its own tokens: CapacityError on every rank."""
    world = _world(point, lab)
    args = _arguments(point, lab, world)
    args["max_tokens_per_rank"] = world.max_tokens + (1 if lab.rank == lab.size - 1 else 0)
    _expect_capacity_error(lab, args)
    verify_dispatch(world, lab.rank, point.layout, point.alignment, _dispatch(point, lab, world))
    return 0.0


def _expect_capacity_error(lab: Lab, args: dict[str, Any]) -> None:
    lab.pause()
    try:
        lab.ops.moe_dispatch(**args)
    except CapacityError as error:
        expect(error.op == DISPATCH, f"the error names op {error.op!r}")
        return
    expect(
        False, f"max_tokens_per_rank={args['max_tokens_per_rank']}: expected CapacityError on every rank, got none here"
    )


def _bad_dispatch() -> Case:
    point = Moe("flat", scale_blocks=2, dtype=torch.float8_e4m3fn)
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "x.shape": lambda lab, args: {"x": args["x"].flatten()},
        "x.stride": lambda lab, args: {"x": args["x"].t().contiguous().t()},
        "topk_ids: beyond": lambda lab, args: {"topk_ids": args["topk_ids"] + 1000},
        "topk_ids: -2": lambda lab, args: {"topk_ids": torch.full_like(args["topk_ids"], -2)},
        "topk_ids.dtype": lambda lab, args: {"topk_ids": args["topk_ids"].float()},
        "topk_ids.shape": lambda lab, args: {"topk_ids": args["topk_ids"][1:]},
        "topk_weights.dtype": lambda lab, args: {"topk_weights": args["topk_weights"].half()},
        "topk_weights.shape": lambda lab, args: {"topk_weights": args["topk_weights"][:, 1:]},
        "layout": lambda lab, args: {"layout": "sorted"},
        "num_experts": lambda lab, args: {"num_experts": 0},
        "alignment": lambda lab, args: {"alignment": 0},
        "max_tokens_per_rank": lambda lab, args: {"max_tokens_per_rank": -1},
        "x_scales.shape": lambda lab, args: {"x_scales": args["x_scales"][1:]},
        "x_scales.dtype": lambda lab, args: {"x_scales": args["x_scales"].double()},
    }
    return bad_inputs(
        DISPATCH, lambda lab: _arguments(point, lab, _world(point, lab)), changes, {**point.params, "ranks": 1}
    )


def _bad_combine(point: Moe, lab: Lab) -> float:
    def good(lab: Lab) -> dict[str, Any]:
        world = _world(point, lab)
        batch = _dispatch(point, lab, world)
        out = lab.out((world.x[0].shape[0], point.hidden), point.dtype)
        return {"y": torch.zeros_like(batch.x), "batch": batch, "out": out}

    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "y.dtype": lambda lab, args: {"y": args["y"].to(torch.int8)},
        "y.shape": lambda lab, args: {"y": args["y"][..., 1:]},
        "out.dtype": lambda lab, args: {"out": args["out"].float()},
        "out.shape": lambda lab, args: {"out": args["out"][:, 1:]},
        "out.shape: rows": lambda lab, args: {"out": args["out"][1:]},
    }
    return bad_inputs(COMBINE, good, changes, point.params).run(lab)
