"""Cases of `moe_expert_ffn`: batches laid out by hand from the contract, compared with the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.ops.moe_dispatch.contract import LAYOUTS, ExpertBatch
from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import check_close, expect
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.tolerances import limit

__all__ = ["cases"]

OP = "moe_expert_ffn"


@dataclass(frozen=True)
class Ffn:
    """One point of the matrix. `counts` are the tokens of each local expert (flat: tokens in all)."""

    layout: str
    counts: tuple[int, ...] = (3, 0, 17, 1)
    hidden: int = 64
    inter: int = 32
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    alignment: int = 1
    minus: float = 0.4
    """Share of -1 in the flat layout."""

    @property
    def params(self) -> dict[str, Any]:
        return {
            "dtype": dtype_name(self.dtype),
            "layout": self.layout,
            "hidden_size": self.hidden,
            "num_experts": len(self.counts),
            "activation": self.activation,
            "alignment": self.alignment,
        }


def cases() -> list[Case]:
    found: list[Case] = []
    for layout in LAYOUTS:
        for name, point in _matrix(Ffn(layout)):
            found += trial(
                OP, f"{layout}-{name}", partial(_build, point), partial(_verify, point), point.params, mutates=()
            )
    found.append(_bad())
    return found


def _matrix(base: Ffn) -> list[tuple[str, Ffn]]:
    found = [
        (dtype_name(dtype), replace(base, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    counts = {"no-tokens": (0, 0, 0), "one-token": (0, 1), "one-expert": (129,), "skewed": (0, 64, 0, 0, 1, 0)}
    found += [(name, replace(base, counts=count)) for name, count in counts.items()]
    if base.layout == "expert_major":
        found += [(f"alignment-{alignment}", replace(base, alignment=alignment)) for alignment in (8, 128)]
    if base.layout == "flat":
        found.append(("all-minus", replace(base, minus=1.0)))
    return [
        *found,
        ("gelu", replace(base, activation="gelu")),
        ("gelu-float32", replace(base, activation="gelu", dtype=torch.float32)),
        ("odd-sizes", replace(base, hidden=40, inter=24)),
        ("wide", replace(base, hidden=256, inter=512, counts=(5, 9))),
    ]


def _build(point: Ffn, lab: Lab) -> dict[str, Any]:
    experts = len(point.counts)
    w13 = lab.normal(experts, 2 * point.inter, point.hidden, dtype=point.dtype, scale=point.hidden**-0.5)
    w2 = lab.normal(experts, point.hidden, point.inter, dtype=point.dtype, scale=point.inter**-0.5)
    return {"batch": _batch(point, lab), "w13": w13, "w2": w2, "activation": point.activation}


def _batch(point: Ffn, lab: Lab) -> ExpertBatch:
    if point.layout == "flat":
        return _flat(point, lab)
    counts = lab.tensor(list(point.counts), torch.int32)
    if point.layout == "masked":
        x = torch.zeros(len(point.counts), max(point.counts) + 3, point.hidden, dtype=point.dtype, device=lab.device)
        for expert, count in enumerate(point.counts):
            x[expert, :count] = lab.normal(count, point.hidden, dtype=point.dtype)
        return ExpertBatch("masked", x, counts, None, None, None, None, None)
    starts = [0]
    for count in point.counts:
        starts.append(starts[-1] + -(-count // point.alignment) * point.alignment)
    x = torch.zeros(starts[-1], point.hidden, dtype=point.dtype, device=lab.device)
    for start, count in zip(starts, point.counts, strict=False):
        x[start : start + count] = lab.normal(count, point.hidden, dtype=point.dtype)
    return ExpertBatch("expert_major", x, counts, lab.tensor(starts, torch.int32), None, None, None, None)


def _flat(point: Ffn, lab: Lab) -> ExpertBatch:
    rows, experts = sum(point.counts), len(point.counts)
    topk = min(3, experts)
    ids = [
        [-1 if lab.random.random() < point.minus else expert for expert in lab.random.sample(range(experts), topk)]
        for _ in range(rows)
    ]
    counts = [sum(row.count(expert) for row in ids) for expert in range(experts)]
    x = lab.normal(rows, point.hidden, dtype=point.dtype)
    topk_ids = lab.tensor(ids, torch.int32).view(rows, topk)
    weights = lab.normal(rows, topk).abs()
    return ExpertBatch("flat", x, lab.tensor(counts, torch.int32), None, topk_ids, weights, None, None)


def _verify(point: Ffn, call: Call) -> float:
    batch, got = call.before["batch"], call.result
    w13, w2 = call.before["w13"].double(), call.before["w2"].double()
    x = batch.x.double()
    want = torch.zeros(batch.x.shape, dtype=torch.float64)
    counts = batch.expert_counts.tolist()
    for expert in range(len(counts)):
        if point.layout == "flat":
            for row, ids in enumerate(batch.topk_ids.tolist()):
                if expert in ids:
                    weight = float(batch.topk_weights[row, ids.index(expert)])
                    want[row] += weight * _ffn(x[row], w13[expert], w2[expert], point.activation)
        elif point.layout == "masked":
            live = slice(0, counts[expert])
            want[expert, live] = _ffn(x[expert, live], w13[expert], w2[expert], point.activation)
        else:
            start = int(batch.expert_starts[expert])
            live = slice(start, start + counts[expert])
            want[live] = _ffn(x[live], w13[expert], w2[expert], point.activation)
    expect(got.dtype == point.dtype, f"result.dtype: expected {point.dtype}, got {got.dtype}")
    expect(got.is_contiguous(), "result: expected contiguous")
    worst = check_close("result", got, want, limit("ffn", point.dtype))
    expect(
        not bool(got.cpu()[want == 0].any()), "result: expected exact zeros in padding and in rows without an expert"
    )
    return worst


def _ffn(x: Tensor, w13: Tensor, w2: Tensor, activation: str) -> Tensor:
    gate, up = (x @ w13.t()).chunk(2, -1)
    if activation == "silu":
        act = gate / (1 + torch.exp(-gate))
    else:
        act = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (act * up) @ w2.t()


def _bad() -> Case:
    point = Ffn("expert_major")
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "w13.shape: experts": lambda lab, args: {"w13": args["w13"][1:]},
        "w13.shape: odd": lambda lab, args: {"w13": args["w13"][:, 1:]},
        "w13.dtype": lambda lab, args: {"w13": args["w13"].to(torch.int8)},
        "w2.shape": lambda lab, args: {"w2": args["w2"][..., 1:]},
        "w2.dtype": lambda lab, args: {"w2": args["w2"].float()},
        "batch.x": lambda lab, args: {"w13": args["w13"].float(), "w2": args["w2"].float()},
        "batch.scales": lambda lab, args: {"batch": _scaled(lab, args["batch"])},
        "activation": lambda lab, args: {"activation": "relu"},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params, mutates=())


def _scaled(lab: Lab, batch: ExpertBatch) -> ExpertBatch:
    scales = lab.normal(batch.x.shape[0], 1)
    return ExpertBatch(batch.layout, batch.x, batch.expert_counts, batch.expert_starts, None, None, scales, None)
