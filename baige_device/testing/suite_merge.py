"""Cases of `merge_attention`: LSE merge against float64, with empty parts, NaN behind -inf, and far-apart weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_attention import check_attention
from baige_device.testing.tolerances import limit

__all__ = ["cases", "measured"]

OP = "merge_attention"


@dataclass(frozen=True)
class Merge:
    """One point of the matrix."""

    tokens: int = 33
    heads: int = 4
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    weights: str = "close"
    given_out: bool = True
    alias: bool = False
    strided: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return {"dtype": dtype_name(self.dtype), "v_head_size": self.width, "num_q_heads": self.heads}


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point in _matrix():
        mutates = ("out", "lse", "out_a", "lse_a") if point.alias else ("out", "lse")
        variants = name == "bfloat16"
        found += trial(
            OP,
            name,
            partial(_build, point),
            partial(_verify, point),
            point.params,
            mutates=mutates,
            device_variants=variants,
        )
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """512 tokens of 16 heads of 512 columns."""
    point = Merge(tokens=512, heads=16, width=512)
    return trial(OP, "512x16x512", partial(_build, point), partial(_verify, point), point.params)


def _matrix() -> list[tuple[str, Merge]]:
    base = Merge()
    found = [
        (dtype_name(dtype), replace(base, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    for weights in ("a-empty", "b-empty", "both-empty", "mixed-empty", "far-apart", "large", "equal"):
        found += [
            (f"{weights}-{dtype_name(dtype)}", replace(base, weights=weights, dtype=dtype))
            for dtype in (torch.bfloat16, torch.float32)
        ]
    found += [(f"tokens-{tokens}", replace(base, tokens=tokens)) for tokens in (0, 1, 2, 127, 129)]
    found += [(f"width-{width}", replace(base, width=width)) for width in (1, 80, 128, 512)]
    found += [(f"heads-{heads}", replace(base, heads=heads)) for heads in (1, 9, 128)]
    return [
        *found,
        ("into-part-a", replace(base, alias=True, weights="mixed-empty")),
        ("result-allocated", replace(base, given_out=False)),
        ("strided-parts", replace(base, strided=True)),
    ]


def _build(point: Merge, lab: Lab) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for part in ("a", "b"):
        out = lab.normal(point.tokens, point.heads, point.width, dtype=point.dtype)
        lse = lab.normal(point.tokens, point.heads, scale=2.0)
        args[f"out_{part}"], args[f"lse_{part}"] = out, lse
    _weigh(point, lab, args)
    if point.strided:
        for name, value in list(args.items()):
            args[name] = value.transpose(0, 1).contiguous().transpose(0, 1)
    if point.alias:
        args["out"], args["lse"] = args["out_a"], args["lse_a"]
    elif point.given_out:
        args["out"] = lab.out((point.tokens, point.heads, point.width), point.dtype)
        args["lse"] = lab.out((point.tokens, point.heads), torch.float32)
    return args


def _weigh(point: Merge, lab: Lab, args: dict[str, Any]) -> None:
    empty = {
        "a-empty": ("a",),
        "b-empty": ("b",),
        "both-empty": ("a", "b"),
        "mixed-empty": ("a", "b"),
    }.get(point.weights, ())
    for part in empty:
        mask = torch.ones(point.tokens, point.heads, dtype=torch.bool, device=lab.device)
        if point.weights == "mixed-empty":
            mask = lab.integers(0, 2, point.tokens, point.heads) == 0
        args[f"lse_{part}"][mask] = -math.inf
        args[f"out_{part}"][mask] = math.nan
    if point.weights == "far-apart":
        args["lse_a"] += 500 * torch.sign(args["lse_b"])
    elif point.weights == "large":
        args["lse_a"] += 1e4
        args["lse_b"] += 1e4
    elif point.weights == "equal":
        args["lse_b"].copy_(args["lse_a"])


def _verify(point: Merge, call: Call) -> float:
    before = call.before
    lse_a, lse_b = before["lse_a"].double(), before["lse_b"].double()
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse.isinf(), 0.0, lse)
    out = torch.zeros(before["out_a"].shape, dtype=torch.float64)
    for part, part_lse in (("a", lse_a), ("b", lse_b)):
        values = torch.where(part_lse.isinf().unsqueeze(-1), 0.0, before[f"out_{part}"].double())
        out += torch.exp(part_lse - safe).unsqueeze(-1) * values
    limits = limit("merge_out", point.dtype), limit("merge_out", torch.float32)
    return check_attention(call.args, call.result, (out, lse), point.dtype, limits)


def _bad() -> Case:
    point = Merge()
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "out_a.dtype": lambda lab, args: {"out_a": args["out_a"].to(torch.int16)},
        "out_b.shape": lambda lab, args: {"out_b": args["out_b"][1:]},
        "out_b.dtype": lambda lab, args: {"out_b": args["out_b"].float()},
        "lse_a.dtype": lambda lab, args: {"lse_a": args["lse_a"].double()},
        "lse_b.shape": lambda lab, args: {"lse_b": args["lse_b"][:, 1:]},
        "out.shape": lambda lab, args: {"out": args["out"][1:]},
        "lse.dtype": lambda lab, args: {"lse": args["lse"].half()},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params)
