"""Cases of `index_topk`: every returned position's float64 score must reach the K-th best; ties stay open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import expect
from baige_device.testing.lab import Lab, poison_
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_fp8 import decode_e4m3
from baige_device.testing.paged import Batch, batch_tensors, fill_live, paged_cache
from baige_device.testing.tolerances import limit

__all__ = ["cases", "measured"]

OP = "index_topk"
MIXED = Batch([(1, 37), (5, 5), (7, 140), (1, 1), (3, 16)])
DECODE = Batch([(1, 1), (1, 63), (1, 64), (1, 65), (1, 200)])


@dataclass(frozen=True)
class Index:
    """One point of the matrix."""

    batch: Batch = MIXED
    heads: int = 32
    head_size: int = 128
    page: int = 64
    topk: int = 16
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    scales: bool = False
    cache_layout: str = "contiguous"
    weights: str = "signed"
    q_layout: str = "contiguous"
    given_out: bool = True
    hints: bool = True

    @property
    def params(self) -> dict[str, Any]:
        return {
            "dtype": dtype_name(self.dtype),
            "index_dtype": dtype_name(self.index_dtype),
            "head_size": self.head_size,
            "num_q_heads": self.heads,
            "page_size": self.page,
            "topk": self.topk,
            "max_query_tokens": self.batch.longest_query,
        }


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point, variants in _matrix():
        found += trial(
            OP,
            name,
            partial(_build, point),
            partial(_verify, point),
            point.params,
            mutates=("out",),
            device_variants=variants,
        )
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """Decode of 4 requests at 4096 tokens, top 2048."""
    point = Index(batch=Batch([(1, 4096)] * 4), topk=2048)
    return trial(OP, "4x4096-top-2048", partial(_build, point), partial(_verify, point), point.params, mutates=("out",))


def _matrix() -> list[tuple[str, Index, bool]]:
    base = Index()
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8):
        point = replace(base, dtype=dtype, scales=dtype in (torch.float8_e4m3fn, torch.int8))
        found.append((f"mixed-{dtype_name(dtype)}", point, False))
        found.append((f"decode-{dtype_name(dtype)}", replace(point, batch=DECODE), dtype == torch.bfloat16))
    found += [(f"topk-{topk}", replace(base, topk=topk), False) for topk in (1, 2, 63, 64, 65, 512, 2048)]
    for length in (0, 1, 2, 63, 64, 65):
        queries = min(length, 2)
        found.append((f"length-{length}", replace(base, batch=Batch([(queries, length)])), False))
    found += [(f"page-{page}", replace(base, page=page), False) for page in (1, 16)]
    found += [
        (f"heads-{heads}-size-{size}", replace(base, heads=heads, head_size=size), False)
        for heads, size in ((1, 64), (64, 128), (4, 32))
    ]
    return [
        *found,
        ("topk-2048-of-2100", replace(base, batch=Batch([(1, 2100)]), topk=2048, heads=4), False),
        ("no-requests", replace(base, batch=Batch([])), False),
        ("no-requests-padded", replace(base, batch=Batch([], padding_rows=3)), False),
        ("no-tokens", replace(base, batch=Batch([(0, 12), (0, 90)])), False),
        ("padding-rows", replace(base, batch=Batch([(1, 90), (2, 33)], padding_rows=4)), True),
        ("padded-requests", replace(base, batch=Batch([(1, 90), (1, 0), (1, 0)])), False),
        ("idle-request", replace(base, batch=Batch([(1, 90), (0, 70), (1, 33)])), False),
        ("weights-negative", replace(base, weights="negative"), False),
        ("weights-zero", replace(base, weights="zero"), False),
        ("equal-scores", replace(base, weights="equal"), False),
        ("bf16-with-scales", replace(base, scales=True), False),
        ("int64-index", replace(base, index_dtype=torch.int64), False),
        ("cache-page-gap", replace(base, cache_layout="page-gap"), False),
        ("cache-interleaved", replace(base, cache_layout="interleaved"), False),
        ("q-row-gap", replace(base, q_layout="row-gap"), False),
        ("result-allocated", replace(base, given_out=False), False),
        ("no-hints", replace(base, hints=False), False),
    ]


def _build(point: Index, lab: Lab) -> dict[str, Any]:
    tensors, pages = batch_tensors(lab, point.batch, point.page, point.index_dtype)
    k_cache = paged_cache(lab, pages, point.page, (point.head_size,), point.dtype, point.cache_layout)
    fill_live(lab, k_cache, tensors, point.page)
    q = _queries(point, lab)
    weights = lab.normal(q.shape[0], point.heads)
    if point.weights == "negative":
        weights = -weights.abs()
    elif point.weights == "zero":
        weights.zero_()
    elif point.weights == "equal":
        _make_equal(lab, k_cache, tensors, point)
    if point.batch.padding_rows:
        weights[-point.batch.padding_rows :] = math.nan
    args: dict[str, Any] = {"q": q, "weights": weights, "k_cache": k_cache, **tensors, "topk": point.topk}
    if point.scales:
        args["k_scales"] = _scales(lab, k_cache, tensors, point.page)
    if point.hints:
        args.update(max_query_tokens=point.batch.longest_query, max_seq_tokens=point.batch.longest_sequence + 9)
    if point.given_out:
        args["out"] = lab.out((q.shape[0], point.topk), torch.int32)
    return args


def _queries(point: Index, lab: Lab) -> Tensor:
    rows = point.batch.queries
    if point.dtype == torch.int8:
        return lab.integers(-127, 128, rows, point.heads, point.head_size, dtype=torch.int8)
    q = lab.normal(rows, point.heads, point.head_size).to(point.dtype)
    if point.q_layout == "row-gap":
        wide = poison_(torch.empty(rows, point.heads + 1, point.head_size, dtype=point.dtype, device=lab.device))
        return wide[:, : point.heads].copy_(q)
    return q


def _make_equal(lab: Lab, cache: Tensor, tensors: dict[str, Tensor], point: Index) -> None:
    """All keys of a request are the same: every choice of K distinct visible positions is right."""
    key = lab.normal(point.head_size, dtype=cache.dtype)
    for row, length in enumerate(tensors["seq_lens"].tolist()):
        for token in range(length):
            cache[int(tensors["block_table"][row, token // point.page]), token % point.page] = key


def _scales(lab: Lab, cache: Tensor, tensors: dict[str, Tensor], page: int) -> Tensor:
    scales = poison_(torch.empty(cache.shape[:2], dtype=torch.float32, device=lab.device))
    for row, length in enumerate(tensors["seq_lens"].tolist()):
        for token in range(length):
            place = int(tensors["block_table"][row, token // page]), token % page
            scales[place] = 0.25 + lab.random.random()
    return scales


def _verify(point: Index, call: Call) -> float:
    before, got = call.before, call.result
    given = call.args.get("out")
    expect(given is None or got.data_ptr() == given.data_ptr(), "result: expected the buffer given as out")
    expect(got.dtype == torch.int32, f"result.dtype: expected int32, got {got.dtype}")
    expect(tuple(got.shape) == (point.batch.queries, point.topk), f"result.shape: got {list(got.shape)}")
    rows = got.tolist()
    starts = before["q_starts"].tolist()
    covered, worst = 0, 0.0
    for request, length in enumerate(before["seq_lens"].tolist()):
        queries = starts[request + 1] - starts[request]
        for number in range(queries):
            row = starts[request] + number
            visible = max(length - queries + number + 1, 0) if length else 0
            worst = max(worst, _check_row(point, before, request, row, visible, rows[row]))
        covered = starts[request + 1]
    for row in range(covered, point.batch.queries):
        expect(set(rows[row]) == {-1}, f"row {row}: expected -1 in a padded row, got {rows[row][:8]}")
    return worst


def _check_row(point: Index, before: Any, request: int, row: int, visible: int, got: list[int]) -> float:
    chosen = [position for position in got if position != -1]
    want = min(point.topk, visible)
    expect(
        all(0 <= position < visible for position in chosen),
        f"row {row}: expected positions in [0, {visible}) or -1, got {sorted(chosen)[:4]} ... {sorted(chosen)[-4:]}",
    )
    expect(len(set(chosen)) == len(chosen), f"row {row}: a position is listed twice")
    expect(len(chosen) == want, f"row {row}: expected {want} positions, got {len(chosen)}")
    if not want or want == visible:
        return 0.0
    score, slack = _scores(point, before, request, row, visible)
    threshold = float(score.topk(want).values[-1])
    short = threshold - score[chosen]
    allowed = slack * limit("index_score", point.dtype)
    place = int((short - allowed[chosen]).argmax())
    expect(
        bool((short <= allowed[chosen] + float(allowed.max())).all()),
        f"row {row}: position {chosen[place]} scores {float(score[chosen[place]]):.6g}, below the {want}-th best "
        f"{threshold:.6g}",
    )
    return max(float((short / slack[chosen].clamp(min=1e-30)).max()), 0.0) if float(slack.max()) else 0.0


def _scores(point: Index, before: Any, request: int, row: int, visible: int) -> tuple[Tensor, Tensor]:
    """float64 scores of the visible keys, and the magnitude sum |w||q||k| that bounds their rounding."""
    positions = torch.arange(visible)
    pages = before["block_table"][request].long()[positions // point.page]
    keys = _as_double(before["k_cache"][pages, positions % point.page])
    factor = torch.ones(visible, dtype=torch.float64)
    if before.get("k_scales") is not None:
        factor = before["k_scales"][pages, positions % point.page].double()
    q, weights = _as_double(before["q"][row]), before["weights"][row].double()
    score = (torch.relu(q @ keys.t()) * weights.unsqueeze(1)).sum(0) * factor
    slack = ((q.abs() @ keys.abs().t()) * weights.abs().unsqueeze(1)).sum(0) * factor
    return score, slack


def _as_double(tensor: Tensor) -> Tensor:
    return decode_e4m3(tensor) if tensor.dtype == torch.float8_e4m3fn else tensor.double()


def _bad() -> Case:
    point = Index(scales=True)
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "q.dtype": lambda lab, args: {"q": args["q"].to(torch.int32)},
        "weights.dtype": lambda lab, args: {"weights": args["weights"].half()},
        "weights.shape": lambda lab, args: {"weights": args["weights"][:, 1:]},
        "k_cache.dtype": lambda lab, args: {"k_cache": args["k_cache"].float()},
        "k_cache.shape": lambda lab, args: {"k_cache": args["k_cache"][..., :7]},
        "topk": lambda lab, args: {"topk": 0},
        "k_scales.shape": lambda lab, args: {"k_scales": args["k_scales"][1:]},
        "seq_lens: over the table": lambda lab, args: {"seq_lens": args["seq_lens"] + 100_000, "max_seq_tokens": 0},
        "block_table: negative page": lambda lab, args: {"block_table": torch.full_like(args["block_table"], -4)},
        "out.dtype": lambda lab, args: {"out": args["out"].long()},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params)
