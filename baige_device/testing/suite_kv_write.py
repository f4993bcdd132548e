"""Cases of `kv_write`: the named slots get the rows, bit for bit, and nothing else of the cache changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import check_storage, expect
from baige_device.testing.lab import Lab, poison_
from baige_device.testing.large import large_case
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_fp8 import nearest_e4m3
from baige_device.testing.paged import ABSURD, CACHE_LAYOUTS, paged_cache

__all__ = ["cases", "measured"]

OP = "kv_write"
E4M3 = torch.float8_e4m3fn
EXTREMES = (0.0, 1.0, 447.0, 448.0, 449.0, 463.0, 464.0, 465.0, 480.0, 512.0, 6e4, math.inf, math.nan)
"""On both sides of the largest float8 value, 448, and of 464, above which a conversion may round to NaN."""


@dataclass(frozen=True)
class Write:
    """One point of the matrix."""

    tokens: int = 33
    groups: int = 2
    width: int = 64
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int64
    pattern: str = "valid"
    spare_slots: int = 0
    cache_layout: str = "contiguous"
    values_layout: str = "contiguous"
    extremes: bool = False
    """Whether the values are those of `EXTREMES`, in random order and with random signs."""
    slots_layout: str = "contiguous"

    @property
    def params(self) -> dict[str, Any]:
        found = {
            "dtype": dtype_name(self.dtype),
            "index_dtype": dtype_name(self.index_dtype),
            "head_size": self.width,
            "num_kv_heads": self.groups,
            "page_size": self.page,
        }
        return {**found, "cache_dtype": dtype_name(self.cache_dtype)} if self.cache_dtype else found


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point, variants in _matrix():
        found += trial(
            OP, name, partial(_build, point), _verify, point.params, mutates=("cache",), device_variants=variants
        )
    found.append(large_case(OP, "offsets-over-2-gib", _large, Write(groups=1, width=576).params))
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """4096 latent rows of 576 bf16."""
    point = Write(tokens=4096, groups=1, width=576, page=64)
    return trial(OP, "4096x576", partial(_build, point), _verify, point.params, mutates=("cache",))


def _matrix() -> list[tuple[str, Write, bool]]:
    base = Write()
    found = []
    found += [(f"tokens-{tokens}", replace(base, tokens=tokens), False) for tokens in (0, 1, 2, 127, 128, 129)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8):
        found.append(
            (f"dtype-{dtype_name(dtype)}", replace(base, dtype=dtype, pattern="half"), dtype == torch.bfloat16)
        )
    floats = (torch.float32, torch.bfloat16, torch.float16)
    conversions = [(one, other) for one in floats for other in floats if one != other]
    conversions += [(torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e4m3fn)]
    for source, target in conversions:
        name = f"convert-{dtype_name(source)}-{dtype_name(target)}"
        found.append((name, replace(base, dtype=source, cache_dtype=target), False))
    found += [
        (
            f"saturates-{dtype_name(source)}",
            replace(base, dtype=source, cache_dtype=E4M3, pattern="half", extremes=True),
            source == torch.bfloat16,
        )
        for source in floats
    ]
    found += [
        (f"row-{groups}x{width}", replace(base, groups=groups, width=width), False)
        for groups, width in ((1, 576), (1, 656), (8, 128), (3, 64), (1, 132), (1, 1), (5, 7))
    ]
    found += [(f"page-{page}", replace(base, page=page), False) for page in (1, 64)]
    found += [
        (f"minus-{pattern}", replace(base, pattern=pattern), False) for pattern in ("half", "all", "zero-and-minus")
    ]
    found += [(f"cache-{layout}", replace(base, cache_layout=layout), False) for layout in CACHE_LAYOUTS[1:-1]]
    found += [
        (f"values-{layout}", replace(base, values_layout=layout), False)
        for layout in ("row-gap", "head-gap", "expanded")
    ]
    found += [(f"slots-{layout}", replace(base, slots_layout=layout), False) for layout in ("step-2", "offset-1")]
    return [
        *found,
        ("spare-slots", replace(base, spare_slots=7, pattern="half"), True),
        ("only-spare-slots", replace(base, tokens=0, spare_slots=3), False),
        ("cache-absurd-stride", replace(base, groups=1, width=576, cache_layout="absurd-head-stride"), False),
        ("values-absurd-stride", replace(base, tokens=1, values_layout="absurd-stride"), False),
        ("int32-slots", replace(base, index_dtype=torch.int32), False),
    ]


def _build(point: Write, lab: Lab) -> dict[str, Any]:
    pages = -(-point.tokens // point.page) + 3
    dtype = point.cache_dtype or point.dtype
    if dtype == torch.int8:
        cache = paged_cache(lab, pages, point.page, (point.groups, point.width), torch.uint8).view(torch.int8)
    else:
        cache = paged_cache(lab, pages, point.page, (point.groups, point.width), dtype, point.cache_layout)
    lab.bytes_like(cache)
    return {"values": _values(point, lab), "cache": cache, "slots": _slots(point, lab, pages * point.page)}


def _values(point: Write, lab: Lab) -> Tensor:
    shape = (point.tokens, point.groups, point.width)
    if point.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        return lab.integers(0, 256, *shape, dtype=torch.uint8).view(point.dtype)
    if point.extremes:
        some = lab.tensor(EXTREMES, torch.float32)[lab.integers(0, len(EXTREMES), *shape)]
        return (some * (2 * lab.integers(0, 2, *shape) - 1)).to(point.dtype)
    values = lab.normal(*shape, dtype=point.dtype)
    if point.values_layout == "row-gap":
        wide = poison_(values.new_empty(shape[0], shape[1] + 3, shape[2]))[:, : shape[1]]
        return wide.copy_(values)
    if point.values_layout == "head-gap":
        wide = poison_(values.new_empty(shape[0], shape[1], shape[2] + 5))[..., : shape[2]]
        return wide.copy_(values)
    if point.values_layout == "absurd-stride":
        return values.as_strided(shape, (ABSURD, point.width, 1))
    if point.values_layout == "expanded":
        return values[:1].contiguous().expand(shape)
    return values


def _slots(point: Write, lab: Lab, total: int) -> Tensor:
    """Distinct slots; those behind the last token name slots outside the cache and must not be looked at."""
    slots = lab.permutation(total, point.tokens)
    if point.pattern == "half":
        slots = torch.where(lab.integers(0, 2, point.tokens) == 0, -1, slots)
    elif point.pattern == "all":
        slots = torch.full_like(slots, -1)
    elif point.pattern == "zero-and-minus":
        slots = torch.full_like(slots, -1)
        slots[point.tokens // 2] = 0
    spare = torch.full((point.spare_slots,), total + 1, dtype=slots.dtype, device=lab.device)
    slots = torch.cat([slots, spare]).to(point.index_dtype)
    if point.slots_layout == "step-2":
        wide = torch.full((2 * slots.numel(),), -9, dtype=slots.dtype, device=lab.device)
        wide[::2] = slots
        return wide[::2]
    if point.slots_layout == "offset-1":
        return torch.cat([slots.new_full((1,), -9), slots])[1:]
    return slots


def _verify(call: Call) -> float:
    values, want = call.before["values"], call.before["cache"]
    rows = _converted(values, want.dtype)
    page = want.shape[1]
    for token, slot in enumerate(call.before["slots"].tolist()[: values.shape[0]]):
        if slot >= 0:
            want[slot // page, slot % page] = rows[token]
            if values.dtype != want.dtype == E4M3:
                _take_over_nan(want[slot // page, slot % page], call.args["cache"][slot // page, slot % page])
    check_storage("cache", call.args["cache"], want)
    expect(call.result is None, f"result: expected None, got {type(call.result).__name__}")
    return 0.0


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == E4M3 and values.dtype != dtype:
        wide = values.double()
        return torch.where(wide.isnan(), wide, nearest_e4m3(wide)).float().to(dtype)
    return values.to(dtype)


def _take_over_nan(want: Tensor, got: Tensor) -> None:
    """float8 has two NaN, and either is right."""
    codes, found = want.view(torch.uint8), got.cpu().view(torch.uint8)
    codes.copy_(torch.where((codes & 0x7F == 0x7F) & (found & 0x7F == 0x7F), found, codes))


def _large(lab: Lab) -> float:
    """Slots on both sides of 2^31 elements of a bf16 latent cache."""
    width, page = 576, 64
    pages = 4_000_000 // page
    cache = torch.empty(pages, page, 1, width, dtype=torch.bfloat16, device=lab.device)
    edges = [0, 1, 2**31 // (2 * width) + 1, 2**31 // width, 2**31 // width + 1, pages * page - 1]
    for dtype in (torch.int32, torch.int64):
        values = lab.normal(len(edges), 1, width, dtype=torch.bfloat16)
        lab.ops.kv_write(values, cache, lab.tensor(edges, dtype))
        lab.synchronize()
        for token, slot in enumerate(edges):
            expect(bool((cache[slot // page, slot % page] == values[token]).all()), f"slot {slot}: wrong row")
    return 0.0


def _bad() -> Case:
    point = Write()
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "slots: beyond the cache": lambda lab, args: {"slots": args["slots"] + 100_000},
        "slots: -2": lambda lab, args: {"slots": torch.full_like(args["slots"], -2)},
        "slots: one slot twice": lambda lab, args: {"slots": torch.cat([args["slots"][:-1], args["slots"][:1]])},
        "slots.dtype": lambda lab, args: {"slots": args["slots"].float()},
        "slots.shape": lambda lab, args: {"slots": args["slots"][1:]},
        "values.shape": lambda lab, args: {"values": args["values"].flatten(1)},
        "values.dtype": lambda lab, args: {"values": args["values"].double()},
        "values.stride": lambda lab, args: {"values": args["values"].transpose(1, 2).contiguous().transpose(1, 2)},
        "cache.shape": lambda lab, args: {"cache": args["cache"][..., :3]},
        "cache.dtype": lambda lab, args: {"cache": args["cache"].view(torch.int16)},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params, mutates=("cache",))
