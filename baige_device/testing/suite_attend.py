"""Cases of `attend_paged`: ragged prefill, chunks and decode against float64, NaN in all that is not live."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.lab import Lab, poison_
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_attention import check_attention, draw_scale, paged_oracle
from baige_device.testing.paged import ABSURD, Batch, batch_tensors, fill_live, paged_cache
from baige_device.testing.tolerances import limit

__all__ = ["cases", "measured"]

OP = "attend_paged"
MIXED = Batch([(1, 37), (5, 5), (7, 40), (1, 1), (3, 16)])
DECODE = Batch([(1, 1), (1, 15), (1, 16), (1, 17), (1, 49)])


@dataclass(frozen=True)
class Dense:
    """One point of the matrix."""

    batch: Batch = MIXED
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    v_head_size: int = 64
    mla: bool = False
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    scale: float = 0.0
    """0 draws one."""
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    cache_layout: str = "contiguous"
    q_layout: str = "contiguous"
    given_out: bool = True
    hints: bool = True

    @property
    def params(self) -> dict[str, Any]:
        return {
            "dtype": dtype_name(self.dtype),
            "index_dtype": dtype_name(self.index_dtype),
            "head_size": self.head_size,
            "v_head_size": self.v_head_size,
            "num_q_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "mla": self.mla,
            "page_size": self.page,
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "max_query_tokens": self.batch.longest_query,
        }


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point, variants in _matrix():
        found += trial(
            OP, name, partial(_build, point), partial(_verify, point), point.params, device_variants=variants
        )
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """Decode of 8 requests at 1024 tokens, and a prefill of 512."""
    decode = Dense(batch=Batch([(1, 1024)] * 8), heads=8, kv_heads=2, head_size=128, v_head_size=128)
    prefill = replace(decode, batch=Batch([(512, 512)]))
    found: list[Case] = []
    for name, point in (("decode-8x1024", decode), ("prefill-512", prefill)):
        found += trial(OP, name, partial(_build, point), partial(_verify, point), point.params)
    return found


def _matrix() -> list[tuple[str, Dense, bool]]:
    base = Dense()
    mla = replace(base, heads=16, kv_heads=1, head_size=576, v_head_size=512, mla=True)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found.append((f"mixed-{dtype_name(dtype)}", replace(base, dtype=dtype), False))
        found.append((f"decode-{dtype_name(dtype)}", replace(base, dtype=dtype, batch=DECODE), dtype == torch.bfloat16))
        found.append((f"mla-decode-{dtype_name(dtype)}", replace(mla, dtype=dtype, batch=DECODE), False))
    found += [
        (f"heads-{heads}-kv-{groups}", replace(base, heads=heads, kv_heads=groups), False)
        for heads, groups in ((1, 1), (4, 4), (9, 3), (8, 1), (32, 2))
    ]
    found += [
        (f"head-size-{size}-{v_size}", replace(base, head_size=size, v_head_size=v_size), False)
        for size, v_size in ((128, 128), (192, 128), (256, 256), (80, 80), (64, 32))
    ]
    for length in (0, 1, 2, 15, 16, 17, 129):
        queries = min(length, 3)
        found.append((f"length-{length}", replace(base, batch=Batch([(queries, length)])), False))
    found += [(f"page-{page}", replace(base, page=page), False) for page in (1, 4, 64)]
    small = replace(base, heads=4, kv_heads=1, head_size=48, v_head_size=32, mla=True)
    return [
        *found,
        ("mla-prefill", replace(mla, batch=Batch([(9, 20), (4, 4)]), dtype=torch.float32), False),
        ("mla-small", replace(small, dtype=torch.float32), False),
        ("mla-page-64", replace(mla, page=64, batch=Batch([(1, 63), (1, 64), (1, 65)])), False),
        ("prefill-whole", replace(base, batch=Batch([(40, 40), (17, 17)])), False),
        ("no-requests", replace(base, batch=Batch([])), False),
        ("no-requests-padded", replace(base, batch=Batch([], padding_rows=3)), False),
        ("no-tokens", replace(base, batch=Batch([(0, 12), (0, 33)])), False),
        ("padded-requests", replace(base, batch=Batch([(1, 9), (1, 0), (1, 0)])), True),
        ("padding-rows", replace(base, batch=Batch([(1, 9), (2, 33)], padding_rows=5)), True),
        ("idle-request", replace(base, batch=Batch([(1, 9), (0, 12), (2, 33)])), False),
        ("window-1", replace(base, window=1), False),
        ("window-8", replace(base, window=8), False),
        ("window-over-length", replace(base, window=500), False),
        ("window-decode", replace(base, window=16, batch=DECODE), False),
        ("soft-cap", replace(base, scale=0.5, soft_cap=5.0), False),
        ("soft-cap-window", replace(base, scale=0.5, soft_cap=3.0, window=9, dtype=torch.float32), False),
        ("scale-usual", replace(base, scale=base.head_size**-0.5), False),
        ("mla-scale-deepseek", replace(mla, scale=192**-0.5, batch=DECODE), False),
        ("bidirectional", replace(base, causal=False), False),
        ("int64-index", replace(base, index_dtype=torch.int64), False),
        ("result-allocated", replace(base, given_out=False), False),
        ("no-hints", replace(base, hints=False), False),
        ("q-row-gap", replace(base, q_layout="row-gap"), False),
        ("q-step-2", replace(base, q_layout="step-2"), False),
        ("cache-page-gap", replace(base, cache_layout="page-gap"), False),
        ("cache-interleaved", replace(base, cache_layout="interleaved"), False),
        ("cache-heads-first", replace(base, cache_layout="heads-first"), False),
        ("cache-offset-1", replace(base, cache_layout="offset-1"), False),
        ("q-absurd-stride", replace(base, q_layout="absurd-stride", batch=Batch([(1, 33)])), False),
        ("mla-cache-absurd-stride", replace(mla, cache_layout="absurd-head-stride", dtype=torch.float32), False),
        ("mla-cache-page-gap", replace(mla, cache_layout="page-gap", dtype=torch.float32), False),
    ]


def _build(point: Dense, lab: Lab) -> dict[str, Any]:
    tensors, pages = batch_tensors(lab, point.batch, point.page, point.index_dtype)
    dead = [max(length - queries + 1 - point.window, 0) if point.window else 0 for queries, length in point.batch.lens]
    k_cache = paged_cache(lab, pages, point.page, (point.kv_heads, point.head_size), point.dtype, point.cache_layout)
    fill_live(lab, k_cache, tensors, point.page, dead)
    v_cache = None
    if not point.mla:
        v_cache = paged_cache(
            lab, pages, point.page, (point.kv_heads, point.v_head_size), point.dtype, point.cache_layout
        )
        fill_live(lab, v_cache, tensors, point.page, dead)
    args: dict[str, Any] = {"q": _queries(point, lab), "k_cache": k_cache, "v_cache": v_cache, **tensors}
    args["scale"] = point.scale or draw_scale(lab.constants, point.head_size)
    args.update(causal=point.causal, window=point.window, logits_soft_cap=point.soft_cap)
    if point.mla:
        args["v_dim"] = point.v_head_size
    if point.hints:
        args.update(max_query_tokens=point.batch.longest_query + 1, max_seq_tokens=point.batch.longest_sequence + 7)
    if point.given_out:
        args["out"] = lab.out((point.batch.queries, point.heads, point.v_head_size), point.dtype)
        args["lse"] = lab.out((point.batch.queries, point.heads), torch.float32)
    return args


def _queries(point: Dense, lab: Lab) -> torch.Tensor:
    rows, width = point.batch.queries, point.head_size
    q = lab.normal(rows, point.heads, width, dtype=point.dtype)
    if point.batch.padding_rows:
        q[-point.batch.padding_rows :] = math.nan
    if point.q_layout == "row-gap":
        wide = poison_(torch.empty(rows, point.heads + 2, width, dtype=point.dtype, device=lab.device))[
            :, : point.heads
        ]
        return wide.copy_(q)
    if point.q_layout == "absurd-stride":
        return q.as_strided(q.shape, (ABSURD, width, 1))
    if point.q_layout == "step-2":
        wide = poison_(torch.empty(rows, point.heads, 2 * width, dtype=point.dtype, device=lab.device))[..., ::2]
        return wide.copy_(q)
    return q


def _verify(point: Dense, call: Call) -> float:
    limits = limit("attention_out", point.dtype), limit("attention_lse", point.dtype)
    return check_attention(call.args, call.result, paged_oracle(call.before), point.dtype, limits)


def _bad() -> Case:
    point = Dense()
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "q.dtype": lambda lab, args: {"q": args["q"].to(torch.int32)},
        "q.shape: heads": lambda lab, args: {"q": args["q"][:, :3], "out": None, "lse": None},
        "k_cache.shape": lambda lab, args: {"k_cache": args["k_cache"][..., :32]},
        "v_cache.dtype": lambda lab, args: {"v_cache": args["v_cache"].float()},
        "v_dim": lambda lab, args: {"v_cache": None, "v_dim": 0},
        "block_table.dtype": lambda lab, args: {"block_table": args["block_table"].float()},
        "block_table: negative page": lambda lab, args: {"block_table": torch.full_like(args["block_table"], -1)},
        "q_starts.shape": lambda lab, args: {"q_starts": args["q_starts"][1:]},
        "q_starts: descending": lambda lab, args: {"q_starts": args["q_starts"].flip(0)},
        "seq_lens: over the table": lambda lab, args: {"seq_lens": args["seq_lens"] + 1000, "max_seq_tokens": 0},
        "seq_lens: fewer than queries": lambda lab, args: {"seq_lens": torch.ones_like(args["seq_lens"])},
        "scale": lambda lab, args: {"scale": math.inf},
        "window": lambda lab, args: {"window": -1},
        "logits_soft_cap": lambda lab, args: {"logits_soft_cap": -1.0},
        "out.dtype": lambda lab, args: {"out": args["out"].float()},
        "lse.shape": lambda lab, args: {"lse": args["lse"][:, :1]},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params)
