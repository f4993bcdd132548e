"""Cases of `uva_sparse_gather` and `uva_sparse_scatter`: one matrix, opposite directions, compared by bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.ops.uva_sparse_gather.contract import num_rows
from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import check_storage, expect
from baige_device.testing.lab import Lab
from baige_device.testing.large import large_case
from baige_device.testing.needs import dtype_name
from baige_device.testing.pools import LAYOUTS, STALE_ROWS, pool, pool_row

__all__ = ["cases", "measured"]

GATHER, SCATTER = "uva_sparse_gather", "uva_sparse_scatter"
ROWS = (0, 1, 2, 127, 128, 129)
ROW_BYTES = (1, 7, 132, 576, 584, 656, 1152)
BASE_REQUESTS = 3


@dataclass(frozen=True)
class Copy:
    """One point of the matrix."""

    op: str
    rows: int = 33
    width: int = 132
    dtype: torch.dtype = torch.uint8
    index_dtype: torch.dtype = torch.int64
    layout: str = "flat"
    pattern: str = "valid"
    count: str = "none"
    requests: int = 0
    """0 is a flat plan [N]; B > 0 is a plan [B, rows]."""
    plan_layout: str = "contiguous"
    offsets: torch.dtype | None = None
    """Type of `dst_offsets`, which only the gather takes; None gives none."""
    max_sms: int = 0

    @property
    def params(self) -> dict[str, Any]:
        size = torch.empty(0, dtype=self.dtype).element_size()
        return {
            "row_bytes": self.width * size,
            "dtype": dtype_name(self.dtype),
            "index_dtype": dtype_name(self.index_dtype),
            "pool": "paged" if self.layout.startswith("paged") else "flat",
            "by_request": self.requests > 0,
        }


def cases() -> list[Case]:
    found: list[Case] = []
    for op in (GATHER, SCATTER):
        for name, point, variants in _matrix(op):
            found += trial(
                op,
                name,
                partial(_build, point),
                partial(_verify, op),
                point.params,
                mutates=("dst",),
                device_variants=variants,
            )
        for dtype in (torch.int32, torch.int64):
            point = Copy(op, index_dtype=dtype, layout="paged")
            params = point.params | {"by_request": True}
            build = partial(_build_idle, point)
            found += trial(op, f"zero-requests-{dtype_name(dtype)}", build, partial(_verify, op), params, mutates=())
        found.append(_bad(op))
        found.append(large_case(op, "offsets-over-2-gib", partial(_large, op), {"row_bytes": 576, "pool": "flat"}))
    return found


def measured() -> list[Case]:
    """4096 rows of 1152 bytes in both directions."""
    found: list[Case] = []
    for op in (GATHER, SCATTER):
        point = Copy(op, rows=4096, width=1152)
        found += trial(
            op, "4096x1152-bytes", partial(_build, point), partial(_verify, op), point.params, mutates=("dst",)
        )
    return found


def _matrix(op: str) -> list[tuple[str, Copy, bool]]:
    base = Copy(op)
    found = [(f"rows-{rows}", replace(base, rows=rows, count="none"), False) for rows in ROWS]
    for number, width in enumerate(ROW_BYTES):
        index = (torch.int32, torch.int64)[number % 2]
        found.append((f"row-bytes-{width}", replace(base, width=width, index_dtype=index, rows=129), width == 656))
        found.append((f"row-bytes-{width}-offset-1", replace(base, width=width, layout="flat-offset-1"), False))
    for dtype, width in ((torch.bfloat16, 576), (torch.float16, 33), (torch.float32, 164), (torch.int8, 130)):
        point = replace(base, dtype=dtype, width=width, layout="paged", pattern="half")
        found.append((f"dtype-{dtype_name(dtype)}", point, False))
    for layout in LAYOUTS:
        found += [
            (f"{layout}-{width}", replace(base, layout=layout, width=width, pattern="half"), False)
            for width in (7, 656)
        ]
    for pattern in ("half", "all", "skip-all", "zero-and-minus"):
        for requests in (0, BASE_REQUESTS):
            name = f"minus-{pattern}-{'by-request' if requests else 'flat'}"
            found.append((name, replace(base, pattern=pattern, requests=requests, layout="paged"), False))
    for count in ("zero", "partial", "full"):
        for requests in (0, 1, BASE_REQUESTS):
            point = replace(base, count=count, requests=requests, pattern="half", index_dtype=torch.int32)
            found.append((f"count-{count}-requests-{requests}", point, count == "partial"))
    found += [
        (f"plan-{plan}", replace(base, plan_layout=plan, requests=BASE_REQUESTS), False)
        for plan in ("transposed", "step-2", "offset-1", "expanded-src")
    ]
    found.append(("plan-step-2-flat", replace(base, plan_layout="step-2"), False))
    found.append(("no-requests", replace(base, requests=BASE_REQUESTS, rows=0, count="zero"), False))
    if op == GATHER:
        for dtype, requests in ((torch.int32, 0), (torch.int32, BASE_REQUESTS), (torch.int64, BASE_REQUESTS)):
            point = replace(base, offsets=dtype, requests=requests, pattern="half", count="partial", layout="paged")
            found.append((f"dst-offsets-{dtype_name(dtype)}-requests-{requests}", point, requests > 0))
    found += [(f"max-sms-{sms}", replace(base, max_sms=sms, rows=129, width=1152), False) for sms in (1, 4)]
    return found


def _build(point: Copy, lab: Lab) -> dict[str, Any]:
    shape = (point.requests, point.rows) if point.requests else (point.rows,)
    entries = point.rows * max(point.requests, 1)
    layout = LAYOUTS[point.layout]
    on_host = point.op == GATHER
    src = pool(lab, entries + 5, point.width, point.dtype, layout, host=on_host)
    dst = pool(lab, entries + 7, point.width, point.dtype, layout, host=not on_host)
    src_rows = lab.integers(0, num_rows(src), *shape)
    dst_rows = lab.permutation(num_rows(dst), entries).view(shape)
    offsets = _offsets(point, lab)
    if offsets is not None:
        dst_rows = offsets.long()[:, None] + torch.stack([lab.permutation(point.rows, point.rows) for _ in offsets])
        dst_rows = dst_rows.view(shape)
    if point.plan_layout == "expanded-src":
        src_rows = src_rows[:1].expand(shape)
    src_rows, dst_rows = _minus(point.pattern, lab, src_rows, dst_rows)
    count = _count(point, lab)
    src_rows, dst_rows = _stale(lab, src, dst, src_rows, dst_rows, count)
    if offsets is not None:
        dst_rows = torch.where(dst_rows < 0, -1, dst_rows - (offsets[:, None] if point.requests else offsets))
    arrange = partial(_arrange, lab, point.plan_layout, point.index_dtype)
    args = {"src": src, "dst": dst, "src_rows": arrange(src_rows), "dst_rows": arrange(dst_rows), "count": count}
    more = {"dst_offsets": offsets} if offsets is not None else {}
    return {**args, **more, "max_sms": point.max_sms} if point.max_sms else {**args, **more}


def _build_idle(point: Copy, lab: Lab) -> dict[str, Any]:
    """A plan `[0, M]` without requests, as an idle step has it."""
    layout, on_host = LAYOUTS[point.layout], point.op == GATHER
    args: dict[str, Any] = {
        "src": pool(lab, 20, point.width, point.dtype, layout, host=on_host),
        "dst": pool(lab, 20, point.width, point.dtype, layout, host=not on_host),
        "src_rows": torch.empty(0, point.rows, dtype=point.index_dtype, device=lab.device),
        "dst_rows": torch.empty(0, point.rows, dtype=point.index_dtype, device=lab.device),
        "count": torch.empty(0, dtype=torch.int32, device=lab.device),
    }
    if on_host:
        args["dst_offsets"] = torch.empty(0, dtype=point.index_dtype, device=lab.device)
    return args


def _offsets(point: Copy, lab: Lab) -> Tensor | None:
    """Where each list's part of the destination begins; the parts are neither in order nor at row 0."""
    if point.offsets is None:
        return None
    lists = max(point.requests, 1)
    return lab.tensor([point.rows * (lists - 1 - number) + 3 for number in range(lists)], point.offsets)


def _minus(pattern: str, lab: Lab, src_rows: Tensor, dst_rows: Tensor) -> tuple[Tensor, Tensor]:
    if pattern == "half":
        src_rows = torch.where(lab.integers(0, 2, *src_rows.shape) == 0, -1, src_rows)
        dst_rows = torch.where(lab.integers(0, 4, *dst_rows.shape) == 0, -1, dst_rows)
    elif pattern == "all":
        src_rows = torch.full_like(src_rows, -1)
    elif pattern == "skip-all":
        dst_rows = torch.full_like(dst_rows, -1)
    elif pattern == "zero-and-minus":
        src_rows = -(torch.arange(src_rows.numel(), device=src_rows.device).view(src_rows.shape) % 2)
    return src_rows, dst_rows


def _count(point: Copy, lab: Lab) -> Tensor | None:
    if point.count == "none":
        return None
    lists = max(point.requests, 1)
    if point.count == "partial":
        return lab.integers(0, point.rows + 1, lists, dtype=torch.int32)
    return lab.tensor([point.rows if point.count == "full" else 0] * lists, torch.int32)


def _stale(
    lab: Lab, src: Tensor, dst: Tensor, src_rows: Tensor, dst_rows: Tensor, count: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Entries behind the count: every other one keeps valid rows (the last step's plan), the rest name rows outside
    the pools (inside the storage, where a touch is noticed)."""
    if count is None:
        return src_rows, dst_rows
    positions = torch.arange(src_rows.shape[-1], device=lab.device)
    dead = positions >= (count.unsqueeze(1) if src_rows.dim() == 2 else count)
    dead = dead & (positions % 2 == 0)
    beyond = positions % STALE_ROWS
    return torch.where(dead, num_rows(src) + beyond, src_rows), torch.where(dead, num_rows(dst) + beyond, dst_rows)


def _arrange(lab: Lab, layout: str, dtype: torch.dtype, rows: Tensor) -> Tensor:
    rows = rows.to(dtype)
    if layout == "transposed":
        return rows.t().contiguous().t()
    if layout == "step-2":
        wide = torch.full((*rows.shape[:-1], 2 * rows.shape[-1]), -9, dtype=dtype, device=lab.device)
        wide[..., ::2] = rows
        return wide[..., ::2]
    if layout == "offset-1":
        flat = torch.cat([rows.new_full((1,), -9), rows.flatten()])
        return flat[1:].view(rows.shape)
    if layout == "expanded-src" and bool((rows == rows[:1]).all()):
        return rows[:1].contiguous().expand(rows.shape)
    return rows.contiguous()


def _verify(op: str, call: Call) -> float:
    src, want = call.before["src"], call.before["dst"]
    count, offsets = call.before["count"], call.before.get("dst_offsets")
    lists = zip(_lists(call.before["src_rows"]), _lists(call.before["dst_rows"]), strict=True)
    for number, (sources, targets) in enumerate(lists):
        live = len(sources) if count is None else int(count[number])
        if offsets is not None:
            targets = [target if target < 0 else target + int(offsets[number]) for target in targets]
        for source, target in list(zip(sources, targets, strict=True))[:live]:
            _copy_row(op, src, want, source, target)
    check_storage("dst", call.args["dst"], want)
    expect(call.result is None, f"result: expected None, got {type(call.result).__name__}")
    return 0.0


def _copy_row(op: str, src: Tensor, dst: Tensor, source: int, target: int) -> None:
    if target < 0 or (source < 0 and op == SCATTER):
        return
    if source < 0:
        pool_row(dst, target).view(torch.uint8).zero_()
    else:
        pool_row(dst, target).view(torch.uint8).copy_(pool_row(src, source).view(torch.uint8))


def _lists(rows: Tensor) -> list[list[int]]:
    return rows.tolist() if rows.dim() == 2 else [rows.tolist()]


def _bad(op: str) -> Case:
    point = Copy(op, count="full", layout="paged")
    wide = replace(point, width=131)
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "src_rows: beyond the pool": lambda lab, args: {"src_rows": args["src_rows"] + num_rows(args["src"])},
        "src_rows: -2": lambda lab, args: {"src_rows": torch.full_like(args["src_rows"], -2)},
        "dst_rows: beyond the pool": lambda lab, args: {"dst_rows": args["dst_rows"] + num_rows(args["dst"])},
        "dst_rows: -5": lambda lab, args: {"dst_rows": torch.full_like(args["dst_rows"], -5)},
        "dst_rows: one row twice": lambda lab, args: {"dst_rows": _first_again_last(args["dst_rows"])},
        "src_rows: float": lambda lab, args: {"src_rows": args["src_rows"].float()},
        "dst_rows: shorter": lambda lab, args: {"dst_rows": args["dst_rows"][1:]},
        "dst.shape: other width": lambda lab, args: {"dst": _build(wide, lab)["dst"]},
        "dst.dtype": lambda lab, args: {"dst": args["dst"].view(torch.int8)},
        "src.stride": lambda lab, args: {"src": args["src"].transpose(1, 2)},
        "count: int64": lambda lab, args: {"count": args["count"].long()},
        "count: too many": lambda lab, args: {"count": lab.tensor([1, 2], torch.int32)},
        "max_sms": lambda lab, args: {"max_sms": -1},
    }
    if op == GATHER:
        changes["dst_offsets: float"] = lambda lab, args: {"dst_offsets": lab.tensor([0.0], torch.float32)}
        changes["dst_offsets: too many"] = lambda lab, args: {"dst_offsets": lab.tensor([0, 0], torch.int32)}
        changes["dst_offsets: beyond the pool"] = lambda lab, args: {
            "dst_offsets": lab.tensor([num_rows(args["dst"])], torch.int32)
        }
    return bad_inputs(op, partial(_build, point), changes, point.params, mutates=("dst",))


def _first_again_last(rows: Tensor) -> Tensor:
    return torch.cat([rows[:-1], rows[:1]])


def _large(op: str, lab: Lab) -> float:
    """Rows on both sides of 2^31 and 2^32 bytes in the source; a wrapped offset would read other rows."""
    width, rows = 576, 7_500_000
    src = (
        lab.host_bytes(width * rows)
        if op == GATHER
        else torch.empty(width * rows, dtype=torch.uint8, device=lab.device)
    )
    src = src.view(rows, width)
    dst_raw = (
        torch.zeros(64 * width, dtype=torch.uint8, device=lab.device) if op == GATHER else lab.host_bytes(64 * width)
    )
    dst = dst_raw.view(64, width)
    edges = [0, 1, 2**31 // width, 2**31 // width + 1, 2**32 // width, 2**32 // width + 1, rows - 1]
    payload = lab.integers(1, 256, len(edges), width, dtype=torch.uint8).to(src.device)
    for number, row in enumerate(edges):
        src[row] = payload[number]
    for index_dtype in (torch.int32, torch.int64):
        dst.zero_()
        plan = lab.tensor(edges, index_dtype)
        getattr(lab.ops, op)(src, dst, plan, torch.arange(len(edges), dtype=index_dtype, device=lab.device))
        lab.synchronize()
        expect(bool((dst[: len(edges)].cpu() == payload.cpu()).all()), f"{dtype_name(index_dtype)} row ids: wrong rows")
        expect(not bool(dst[len(edges) :].any()), "rows that no entry names were written")
    return 0.0
