"""Cases of `dequantize_blocks`: payload times scale, rounded once, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.ops.quantize_blocks.contract import WIRE_FORMATS, scale_shape
from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import expect
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_fp8 import decode_e4m3
from baige_device.testing.tolerances import rounding

__all__ = ["cases", "measured"]

OP = "dequantize_blocks"


@dataclass(frozen=True)
class Coded:
    """One point of the matrix."""

    shape: tuple[int, int] = (96, 160)
    block: tuple[int, int] = (32, 64)
    wire: str = "fp8_e4m3"
    dtype: torch.dtype = torch.bfloat16
    layout: str = "contiguous"
    given_out: bool = True
    all_codes: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return {"out_dtype": dtype_name(self.dtype), "wire": self.wire, "block": self.block}


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point, variants in _matrix():
        found += trial(OP, name, partial(_build, point), _verify, point.params, device_variants=variants)
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """A 2048 x 2048 weight to bf16."""
    found: list[Case] = []
    for wire in WIRE_FORMATS:
        point = Coded(shape=(2048, 2048), block=(128, 128), wire=wire)
        found += trial(OP, f"2048x2048-{wire}", partial(_build, point), _verify, point.params)
    return found


def _matrix() -> list[tuple[str, Coded, bool]]:
    found = []
    for wire in WIRE_FORMATS:
        base = Coded(wire=wire)
        found += [
            (f"{wire}-{dtype_name(dtype)}", replace(base, dtype=dtype), dtype == torch.bfloat16)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ]
        found += [
            (f"{wire}-{rows}x{columns}", replace(base, shape=(rows, columns), block=(128, 128)), False)
            for rows, columns in ((1, 1), (128, 128), (129, 257), (127, 1), (1, 300), (0, 64), (5, 0))
        ]
        found += [
            (f"{wire}-block-{block[0]}-{block[1]}", replace(base, block=block), False)
            for block in ((1, 0), (1, 128), (128, 0), (7, 5))
        ]
        found += [
            (f"{wire}-{layout}", replace(base, layout=layout), False)
            for layout in ("payload-row-gap", "offset-1", "scales-transposed", "out-row-gap")
        ]
        found.append((f"{wire}-result-allocated", replace(base, given_out=False, dtype=torch.float32), False))
    found.append(
        ("fp8_e4m3-all-codes", Coded(shape=(1, 256), block=(1, 0), all_codes=True, dtype=torch.float32), False)
    )
    return found


def _build(point: Coded, lab: Lab) -> dict[str, Any]:
    scales = lab.normal(*scale_shape(*point.shape, point.block)).abs() / 16 + 2.0**-12
    payload = _payload(point, lab)
    out = lab.out(point.shape, point.dtype)
    if point.layout == "scales-transposed":
        scales = scales.t().contiguous().t()
    if point.layout == "payload-row-gap":
        payload = _with_row_gap(lab, payload)
    if point.layout == "offset-1":
        raw = lab.out((payload.numel() + 1,), payload.dtype)[1:].view(payload.shape)
        payload = raw.copy_(payload)
    if point.layout == "out-row-gap":
        out = lab.out((point.shape[0], point.shape[1] + 3), point.dtype)[:, : point.shape[1]]
    args: dict[str, Any] = {"payload": payload, "scales": scales, "block": point.block, "dtype": point.dtype}
    return {**args, "out": out} if point.given_out else args


_PRODUCT_ERROR = 3 * 2.0**-24
"""Three roundings before the last: a chip may hold scale * 127, and divide it by 127 for each product."""


def _payload(point: Coded, lab: Lab) -> Tensor:
    if point.wire == "bf16":
        return lab.normal(*point.shape, dtype=torch.bfloat16)
    codes = lab.integers(0, 256, *point.shape, dtype=torch.uint8)
    if point.all_codes:
        codes = torch.arange(256, dtype=torch.uint8, device=lab.device).view(point.shape)
    if point.wire == "fp8_e4m3":
        codes = torch.where(codes & 0x7F == 0x7F, torch.zeros_like(codes), codes)
    return codes.view(WIRE_FORMATS[point.wire][0])


def _with_row_gap(lab: Lab, payload: Tensor) -> Tensor:
    wide = lab.out((payload.shape[0], payload.shape[1] + 5), payload.dtype)[:, : payload.shape[1]]
    return wide.copy_(payload)


def _verify(call: Call) -> float:
    payload, scales, block = call.before["payload"], call.before["scales"].double(), call.before["block"]
    dtype, given, got = call.before["dtype"], call.args.get("out"), call.result
    expect(got.dtype == dtype, f"result.dtype: expected {dtype}, got {got.dtype}")
    expect(
        tuple(got.shape) == tuple(payload.shape), f"result.shape: expected {list(payload.shape)}, got {list(got.shape)}"
    )
    if given is None:
        expect(got.is_contiguous(), "result: expected contiguous")
    else:
        expect(got.data_ptr() == given.data_ptr(), "result: expected the buffer given as out")
    coded = decode_e4m3(payload) if payload.dtype == torch.float8_e4m3fn else payload.double()
    width = block[1] or max(payload.shape[1], 1)
    spread = scales.repeat_interleave(block[0], 0)[: coded.shape[0]].repeat_interleave(width, 1)[:, : coded.shape[1]]
    want = coded * spread
    found = got.cpu().double()
    expect(not bool(found.isnan().any()), "result: NaN, an element was not written")
    error = (found - want).abs()
    floor = float(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps
    wrong = (error > want.abs() * (rounding(dtype) + _PRODUCT_ERROR) + floor).nonzero()
    if wrong.numel():
        first = tuple(wrong[0].tolist())
        expect(
            False, f"result{list(first)}: expected {want[first]:.9g}, got {found[first]:.9g} ({wrong.shape[0]} differ)"
        )
    expect(not bool(found[coded == 0].any()), "result: expected exact zeros where the payload is zero")
    return float((error / (1 + want.abs())).max()) if error.numel() else 0.0


def _bad() -> Case:
    point = Coded()
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "payload.dtype": lambda lab, args: {"payload": args["payload"].view(torch.uint8)},
        "scales.shape": lambda lab, args: {"scales": args["scales"][:, 1:]},
        "scales.dtype": lambda lab, args: {"scales": args["scales"].double()},
        "block": lambda lab, args: {"block": (0, 64)},
        "payload.stride": lambda lab, args: {"payload": args["payload"].T.contiguous().T},
        "dtype": lambda lab, args: {"out": None, "dtype": torch.int32},
        "dtype: a str": lambda lab, args: {"out": None, "dtype": "bfloat16"},
        "out.shape": lambda lab, args: {"out": args["out"][1:]},
        "out.dtype": lambda lab, args: {"out": args["out"].view(torch.int16)},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params)
