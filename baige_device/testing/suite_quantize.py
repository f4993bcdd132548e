"""Cases of `quantize_blocks`: payload and scale of every block against the definition, in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.quantize_blocks.contract import WIRE_FORMATS, scale_shape
from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import Mismatch, check_equal, check_pair, expect
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_fp8 import decode_e4m3, nearest_e4m3

__all__ = ["cases", "measured"]

OP = "quantize_blocks"
SCALE_SLACK = 2.0**-21
"""Scale against amax / largest magnitude: a few fp32 roundings (some chips multiply by the reciprocal)."""
TINY = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Weight:
    """One point of the matrix."""

    shape: tuple[int, int] = (96, 160)
    block: tuple[int, int] = (32, 64)
    wire: str = "fp8_e4m3"
    dtype: torch.dtype = torch.bfloat16
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def params(self) -> dict[str, Any]:
        return {"dtype": dtype_name(self.dtype), "wire": self.wire, "block": self.block}


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point in _matrix():
        found += trial(OP, name, partial(_build, point), _verify, point.params)
    found += [_nonfinite(wire, value) for wire in ("fp8_e4m3", "int8_absmax") for value in ("nan", "inf")]
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """A 2048 x 2048 bf16 weight."""
    found: list[Case] = []
    for wire in WIRE_FORMATS:
        point = Weight(shape=(2048, 2048), block=(128, 128), wire=wire)
        found += trial(OP, f"2048x2048-{wire}", partial(_build, point), _verify, point.params)
    return found


def _matrix() -> list[tuple[str, Weight]]:
    found = []
    for wire in WIRE_FORMATS:
        base = Weight(wire=wire)
        found += [
            (f"{wire}-{dtype_name(dtype)}", replace(base, dtype=dtype))
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ]
        found += [
            (f"{wire}-{values}", replace(base, dtype=torch.float32, values=values))
            for values in ("zero-block", "zero", "tiny-block", "outlier", "large", "ties", "negative")
        ]
        found += [
            (f"{wire}-{rows}x{columns}", replace(base, shape=(rows, columns), block=(128, 128)))
            for rows, columns in ((1, 1), (128, 128), (129, 257), (127, 1), (1, 300), (0, 64), (5, 0))
        ]
        found += [
            (f"{wire}-block-{block[0]}-{block[1]}", replace(base, block=block, values="zero-block"))
            for block in ((1, 0), (1, 128), (128, 0), (7, 5))
        ]
        found += [
            (f"{wire}-{layout}", replace(base, layout=layout))
            for layout in ("transposed", "step-2", "offset-1", "expanded")
        ]
    return found


def _build(point: Weight, lab: Lab) -> dict[str, Any]:
    weight = _values(point, lab).to(point.dtype).to(lab.device)
    return {"weight": _arrange(point.layout, weight), "block": point.block, "wire": point.wire, "name": "layer.7.w"}


def _values(point: Weight, lab: Lab) -> Tensor:
    weight = lab.normal(*point.shape).cpu()
    bm, bn = point.block[0], point.block[1] or point.shape[1]
    if point.values == "zero":
        weight.zero_()
    elif point.values == "zero-block":
        weight[bm : 2 * bm, :bn] = 0
    elif point.values == "tiny-block":
        weight[:bm, :bn] = 1e-40
        weight[bm : 2 * bm, :bn] = -1e-40
        weight[bm : 2 * bm, 0] = 0
    elif point.values == "outlier":
        weight[3, 5] = 448 * weight.abs().max()
    elif point.values == "large":
        weight = weight * 1e37
        weight[0, 0] = torch.finfo(torch.float32).max
    elif point.values == "negative":
        weight = -weight.abs() - 0.25
    elif point.values == "ties":
        weight = _ties(point, weight)
    return weight


def _ties(point: Weight, weight: Tensor) -> Tensor:
    """Every block's amax is the largest magnitude, so its scale is 1, and the values lie halfway between codes."""
    largest = WIRE_FORMATS[point.wire][1] or 128.0
    halves = torch.tensor([1.0625, 1.1875, 17.0, 19.0, 21.0, -1.0625, -19.0, 0.0009765625, 0.0029296875])
    if point.wire == "int8_absmax":
        halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 64.5, -125.5])
    filled = halves.repeat(-(-weight.numel() // halves.numel()))[: weight.numel()].view(weight.shape).clone()
    filled[:: point.block[0], :: point.block[1]] = largest
    return filled


def _arrange(layout: str, weight: Tensor) -> Tensor:
    if layout == "transposed":
        return weight.t().contiguous().t()
    if layout == "step-2":
        wide = torch.full((weight.shape[0], 2 * weight.shape[1]), 1e4, dtype=weight.dtype, device=weight.device)
        wide[:, ::2] = weight
        return wide[:, ::2]
    if layout == "offset-1":
        flat = torch.cat([weight.new_full((1,), 1e4), weight.flatten()])
        return flat[1:].view(weight.shape)
    if layout == "expanded":
        return weight[:1].contiguous().expand(weight.shape)
    return weight


def _verify(call: Call) -> float:
    weight, block, wire = call.before["weight"].double(), call.before["block"], call.before["wire"]
    check_pair(call.result, "payload, scales")
    payload, scales = call.result
    dtype, largest = WIRE_FORMATS[wire]
    expect(payload.dtype == dtype, f"payload.dtype: expected {dtype}, got {payload.dtype}")
    expect(tuple(payload.shape) == tuple(weight.shape), f"payload.shape: got {list(payload.shape)}")
    expect(payload.is_contiguous(), "payload: expected contiguous")
    expect(scales.dtype == torch.float32, f"scales.dtype: expected float32, got {scales.dtype}")
    shape = scale_shape(weight.shape[0], weight.shape[1], block)
    expect(tuple(scales.shape) == shape, f"scales.shape: expected {list(shape)}, got {list(scales.shape)}")
    got = scales.cpu().double()
    wrong = (~got.isfinite() | (got <= 0)).nonzero().tolist()
    if wrong:
        raise Mismatch(f"scales{wrong[0]}: expected finite and > 0, got {got[tuple(wrong[0])].item()}")
    if wire == "bf16":
        check_equal("scales", got, torch.ones_like(got))
        largest_bf16 = torch.finfo(torch.bfloat16).max
        want = call.before["weight"].float().clamp(-largest_bf16, largest_bf16).to(torch.bfloat16)
        check_equal("payload", payload, want)
        return 0.0
    worst = 0.0
    width = block[1] or max(weight.shape[1], 1)
    for i, j in torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])).tolist():
        part = (slice(i * block[0], (i + 1) * block[0]), slice(j * width, (j + 1) * width))
        worst = max(
            worst, _block(f"block ({i}, {j})", weight[part], payload[part].cpu(), float(got[i, j]), wire, largest)
        )
    return worst


def _block(where: str, weight: Tensor, payload: Tensor, scale: float, wire: str, largest: float) -> float:
    coded = decode_e4m3(payload) if wire == "fp8_e4m3" else payload.double()
    expect(not bool(coded.isnan().any()), f"{where}: NaN in the payload")
    amax = float(weight.abs().max())
    if amax / largest < TINY:
        expect(not bool(coded.any()), f"{where}: amax {amax:.3g} is too small to scale, expected zeros")
        return 0.0
    error = abs(scale * largest / amax - 1)
    expect(error <= SCALE_SLACK, f"{where}: expected scale {amax / largest:.9g}, got {scale:.9g}")
    exact = (weight / scale).clamp(-largest, largest)
    nearest = nearest_e4m3(exact) if wire == "fp8_e4m3" else exact.round()
    excess = (coded - exact).abs() - (nearest - exact).abs()
    worst = float((excess / exact.abs().clamp(min=2.0**-9)).max())
    expect(worst <= 2.0**-20, f"{where}: payload is not weight / scale rounded to nearest (excess {worst:.3g})")
    if scale == 1.0:
        check_equal(f"{where} at scale 1 (ties to even)", coded, nearest)
    return max(error, worst, 0.0)


def _nonfinite(wire: str, value: str) -> Case:
    point = Weight(wire=wire, dtype=torch.float32)

    def run(lab: Lab) -> float:
        args = _build(point, lab)
        args["weight"][70, 130] = float(value)
        try:
            lab.ops.quantize_blocks(**args)
        except ContractError as error:
            text = str(error)
            numbers = re.findall(r"\d+", text.replace("layer.7.w", ""))
            expect(error.op == OP, f"the error names op {error.op!r}")
            expect("layer.7.w" in text, f"the error does not name the weight 'layer.7.w': {text}")
            expect("2" in numbers, f"the error does not name block (2, 2) of the weight: {text}")
            return 0.0
        expect(False, f"a weight with {value} in block (2, 2): expected ContractError, got a result")
        return 0.0

    return Case(OP, f"{wire}-{value}-named", run, point.params)


def _bad() -> Case:
    point = Weight()
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "weight.dtype": lambda lab, args: {"weight": args["weight"].to(torch.int32)},
        "weight.shape": lambda lab, args: {"weight": args["weight"].flatten()},
        "block: zero rows": lambda lab, args: {"block": (0, 128)},
        "block: negative columns": lambda lab, args: {"block": (128, -1)},
        "wire": lambda lab, args: {"wire": "fp4"},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params)
