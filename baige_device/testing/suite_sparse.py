"""Cases of `sparse_attention`: index lists with every -1 pattern, two sets, fp8 rows, NaN in every unlisted row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import check_close
from baige_device.testing.lab import Lab, poison_
from baige_device.testing.large import large_case
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_attention import check_attention, draw_scale, sparse_oracle
from baige_device.testing.paged import paged_cache
from baige_device.testing.tolerances import limit

__all__ = ["cases", "measured"]

OP = "sparse_attention"
PAGE = 16


@dataclass(frozen=True)
class Sparse:
    """One point of the matrix."""

    tokens: int = 5
    heads: int = 8
    kv_heads: int = 1
    head_size: int = 576
    v_head_size: int = 512
    mla: bool = True
    topk: int = 32
    pages: int = 6
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    kv_format: str = "plain"
    scale: float = 0.0
    """0 draws one."""
    pattern: str = "valid"
    extra: str = ""
    """Pattern of the second index set; empty for none."""
    cache_layout: str = "contiguous"
    flat: bool = False
    indices_layout: str = "contiguous"
    q_layout: str = "contiguous"
    given_out: bool = True
    reserved_sms: int = 0

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
            "topk": self.topk,
            "kv_format": self.kv_format,
            "extra": bool(self.extra),
        }


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point, variants in _matrix():
        found += trial(
            OP, name, partial(_build, point), partial(_verify, point), point.params, device_variants=variants
        )
    split = Sparse(extra="half", dtype=torch.float32)
    found.append(
        Case(OP, "two-sets-equal-merge", partial(_merge_equals_joint, split), split.params, ("merge_attention",))
    )
    found.append(large_case(OP, "offsets-over-2-gib", _large, {**Sparse(kv_format="fp8_ds_mla").params, "topk": 8}))
    found.append(_bad())
    return found


def measured() -> list[Case]:
    """8 tokens of 16 heads over 2048 rows, bf16 and fp8 latents."""
    base = Sparse(tokens=8, heads=16, topk=2048, pages=160)
    found: list[Case] = []
    for name, point in (("8x16x2048-bf16", base), ("8x16x2048-fp8", replace(base, kv_format="fp8_ds_mla"))):
        found += trial(OP, name, partial(_build, point), partial(_verify, point), point.params)
    return found


def _matrix() -> list[tuple[str, Sparse, bool]]:
    base = Sparse()
    gqa = Sparse(heads=8, kv_heads=2, head_size=128, v_head_size=128, mla=False)
    fp8 = replace(base, kv_format="fp8_ds_mla")
    found = []
    for kind, point in (("mla", base), ("gqa", gqa), ("fp8", fp8)):
        found += [
            (f"{kind}-{pattern}", replace(point, pattern=pattern), pattern == "half")
            for pattern in ("valid", "half", "all-minus", "few-keys", "zero-and-minus", "one-key")
        ]
        found += [
            (f"{kind}-extra-{pattern}", replace(point, pattern="half", extra=pattern), False)
            for pattern in ("half", "all-minus")
        ]
        found.append((f"{kind}-only-extra", replace(point, pattern="all-minus", extra="half"), False))
        found += [
            (f"{kind}-{dtype_name(dtype)}", replace(point, dtype=dtype, pattern="half"), False)
            for dtype in (torch.float16, torch.float32)
        ]
        found.append((f"{kind}-page-gap", replace(point, cache_layout="page-gap", pattern="half"), False))
        found.append((f"{kind}-flat-pool", replace(point, flat=True, pattern="half"), False))
        found.append((f"{kind}-int64-index", replace(point, index_dtype=torch.int64, pattern="half"), False))
    found += [
        (f"mla-heads-{heads}", replace(base, heads=heads, tokens=2, pattern="half"), False)
        for heads in (1, 16, 64, 128)
    ]
    found += [(f"mla-topk-{topk}", replace(base, topk=topk, pages=10), False) for topk in (0, 1, 63, 65, 129)]
    found += [(f"{kind}-tokens-0", replace(point, tokens=0), False) for kind, point in (("mla", base), ("fp8", fp8))]
    found += [(f"gqa-tokens-{tokens}", replace(gqa, tokens=tokens, pattern="half"), False) for tokens in (0, 1, 33)]
    big = replace(base, tokens=2, topk=2048, pages=140, heads=16)
    return [
        *found,
        ("mla-topk-2048", replace(big, pattern="half"), False),
        ("fp8-topk-2048", replace(big, pattern="half", kv_format="fp8_ds_mla"), False),
        ("mla-small", replace(base, head_size=48, v_head_size=32, dtype=torch.float32, pattern="half"), False),
        ("gqa-ragged-heads", replace(gqa, kv_heads=4, pattern="ragged"), False),
        ("gqa-mha", replace(gqa, kv_heads=8, head_size=64, v_head_size=64, pattern="half"), False),
        ("gqa-v-narrower", replace(gqa, head_size=192, v_head_size=128, pattern="half"), False),
        ("gqa-interleaved-cache", replace(gqa, cache_layout="interleaved", pattern="half"), False),
        ("gqa-heads-first-cache", replace(gqa, cache_layout="heads-first", pattern="half"), False),
        ("gqa-indices-expanded", replace(gqa, indices_layout="expanded", pattern="half"), False),
        ("mla-indices-step-2", replace(base, indices_layout="step-2", pattern="half"), False),
        ("mla-indices-transposed", replace(base, indices_layout="transposed", pattern="half"), False),
        ("mla-offset-1", replace(base, cache_layout="offset-1", pattern="half"), False),
        ("mla-cache-absurd-stride", replace(base, cache_layout="absurd-head-stride", pattern="half"), False),
        ("mla-q-row-gap", replace(base, q_layout="row-gap", pattern="half"), False),
        ("mla-q-step-2", replace(base, q_layout="step-2", pattern="half"), False),
        ("mla-scale-usual", replace(base, scale=576**-0.5, pattern="half"), False),
        ("mla-scale-deepseek", replace(base, scale=192**-0.5, pattern="half"), False),
        ("mla-reserved-sms", replace(base, reserved_sms=8, pattern="half"), False),
        ("mla-result-allocated", replace(base, given_out=False, pattern="half"), False),
    ]


def _build(point: Sparse, lab: Lab) -> dict[str, Any]:
    k, v, indices = _set(point, lab, point.pattern)
    args: dict[str, Any] = {"q": _queries(point, lab), "k_rows": k, "v_rows": v, "indices": indices}
    # Keys that are rounded to bf16 err with the logits: at a large factor a right kernel may miss the limit.
    drawn = draw_scale(lab.constants, point.head_size, small=point.kv_format == "fp8_ds_mla")
    args.update(scale=point.scale or drawn, kv_format=point.kv_format)
    if point.mla:
        args["v_dim"] = point.v_head_size
    if point.extra:
        second = replace(point, topk=point.topk // 2 + 3)
        args["extra_k"], args["extra_v"], args["extra_indices"] = _set(second, lab, point.extra)
    if point.reserved_sms:
        args["reserved_sms"] = point.reserved_sms
    if point.given_out:
        args["out"] = lab.out((point.tokens, point.heads, point.v_head_size), point.dtype)
        args["lse"] = lab.out((point.tokens, point.heads), torch.float32)
    return args


def _set(point: Sparse, lab: Lab, pattern: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """One pool and its lists; every row that no list names is NaN (in particular row 0 and the last one)."""
    rows = point.pages * PAGE
    ids = torch.tensor(
        [[_ids(point, lab, pattern, rows, group) for group in range(point.kv_heads)] for _ in range(point.tokens)],
        dtype=torch.int64,
    ).view(point.tokens, point.kv_heads, point.topk)
    if point.indices_layout == "expanded":
        ids = ids[:, :1].expand(ids.shape)
    listed = [sorted({row for row in ids[:, group].flatten().tolist() if row >= 0}) for group in range(point.kv_heads)]
    if point.kv_format == "fp8_ds_mla":
        k = paged_cache(lab, point.pages, PAGE, (1, 656), torch.uint8, point.cache_layout)
        _fill_fp8(lab, k, listed[0])
        return _flatten(point, k), None, _arrange(point, lab, ids)
    k = paged_cache(lab, point.pages, PAGE, (point.kv_heads, point.head_size), point.dtype, point.cache_layout)
    _fill(lab, k, listed)
    v = None
    if not point.mla:
        v = paged_cache(lab, point.pages, PAGE, (point.kv_heads, point.v_head_size), point.dtype, point.cache_layout)
        _fill(lab, v, listed)
        v = _flatten(point, v)
    return _flatten(point, k), v, _arrange(point, lab, ids)


def _ids(point: Sparse, lab: Lab, pattern: str, rows: int, group: int) -> list[int]:
    """One list of K distinct row ids out of `[1, rows - 1)`, or with row 0 where the pattern says so."""
    inner = range(1, rows - 1)
    found: list[int | None] = list(lab.random.sample(inner, min(point.topk, len(inner))))
    found += [None] * (point.topk - len(found))
    keep = {
        "valid": point.topk,
        "half": point.topk,
        "all-minus": 0,
        "few-keys": min(3, point.topk),
        "one-key": 1,
        "zero-and-minus": 0,
        "ragged": lab.random.choice([0, 1, point.topk // 3, point.topk]) if group else point.topk,
    }[pattern]
    ids = [-1 if row is None or place >= keep else row for place, row in enumerate(found)]
    if pattern == "half":
        ids = [-1 if lab.random.random() < 0.5 else row for row in ids]
    if pattern == "zero-and-minus" and ids:
        ids[lab.random.randrange(len(ids))] = 0
    return ids


def _fill(lab: Lab, cache: Tensor, listed: list[list[int]]) -> None:
    for group, rows in enumerate(listed):
        if rows:
            ids = torch.tensor(rows, device=lab.device)
            cache[ids // PAGE, ids % PAGE, group] = lab.normal(len(rows), cache.shape[-1], dtype=cache.dtype)


def _fill_fp8(lab: Lab, cache: Tensor, rows: list[int]) -> None:
    if not rows:
        return
    latent = lab.normal(len(rows), 512).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (lab.normal(len(rows), 4).abs() + 0.25).view(torch.uint8)
    rope = lab.normal(len(rows), 64, dtype=torch.bfloat16).view(torch.uint8)
    ids = torch.tensor(rows, device=lab.device)
    cache[ids // PAGE, ids % PAGE, 0] = torch.cat([latent, scales, rope], -1)


def _flatten(point: Sparse, cache: Tensor) -> Tensor:
    return cache.flatten(0, 1) if point.flat else cache


def _arrange(point: Sparse, lab: Lab, ids: Tensor) -> Tensor:
    ids = ids.to(point.index_dtype).to(lab.device)
    if point.indices_layout == "expanded":
        return ids[:, :1].contiguous().expand(ids.shape)
    if point.indices_layout == "step-2":
        wide = torch.full((*ids.shape[:-1], 2 * ids.shape[-1]), -3, dtype=ids.dtype, device=lab.device)
        wide[..., ::2] = ids
        return wide[..., ::2]
    if point.indices_layout == "transposed":
        return ids.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return ids


def _queries(point: Sparse, lab: Lab) -> Tensor:
    q = lab.normal(point.tokens, point.heads, point.head_size, dtype=point.dtype)
    if point.q_layout == "row-gap":
        wide = poison_(q.new_empty(point.tokens, point.heads + 2, point.head_size))[:, : point.heads]
        return wide.copy_(q)
    if point.q_layout == "step-2":
        wide = poison_(q.new_empty(point.tokens, point.heads, 2 * point.head_size))[..., ::2]
        return wide.copy_(q)
    return q


def _verify(point: Sparse, call: Call) -> float:
    prefix = "fp8_" if point.kv_format == "fp8_ds_mla" else ""
    limits = limit(f"{prefix}attention_out", point.dtype), limit(f"{prefix}attention_lse", point.dtype)
    return check_attention(call.args, call.result, sparse_oracle(call.before), point.dtype, limits)


def _merge_equals_joint(point: Sparse, lab: Lab) -> float:
    """Attending two sets apart and merging by LSE equals attending them together: wrong LSE bases show up here."""
    args = _build(replace(point, given_out=False), lab)
    joint = lab.ops.sparse_attention(**args)
    shared = {name: args[name] for name in ("q", "scale", "v_dim")}
    first = lab.ops.sparse_attention(k_rows=args["k_rows"], v_rows=None, indices=args["indices"], **shared)
    second = lab.ops.sparse_attention(k_rows=args["extra_k"], v_rows=None, indices=args["extra_indices"], **shared)
    out, lse = lab.ops.merge_attention(*first, *second)
    lab.synchronize()
    worst = check_close("merged lse", lse, joint[1].cpu().double(), 2 * limit("attention_lse", point.dtype))
    return max(worst, check_close("merged out", out, joint[0].cpu().double(), 2 * limit("attention_out", point.dtype)))


def _large(lab: Lab) -> float:
    """fp8 rows on both sides of 2^31 and 2^32 bytes."""
    point = Sparse(kv_format="fp8_ds_mla", tokens=2, topk=8)
    rows = 6_600_000
    ids = [0, 1, 2**31 // 656, 2**31 // 656 + 1, 3_728_271, 2**32 // 656 + 1, rows - 1, -1]
    k = torch.empty(rows, 1, 656, dtype=torch.uint8, device=lab.device)
    small = torch.zeros(1, PAGE, 1, 656, dtype=torch.uint8, device=lab.device)
    live = [row for row in ids if row >= 0]
    _fill_fp8(lab, small, list(range(len(live))))
    for place, row in enumerate(live):
        k[row, 0] = small[0, place, 0]
    compact = lab.tensor([[[*range(len(live)), -1]]] * 2, torch.int32)
    q = _queries(point, lab)
    args: dict[str, Any] = {"q": q, "v_rows": None, "scale": 0.03, "v_dim": 512, "kv_format": "fp8_ds_mla"}
    want = sparse_oracle({**args, "q": q.cpu(), "k_rows": small.cpu(), "indices": compact.cpu()})
    limits = limit("fp8_attention_out", point.dtype), limit("fp8_attention_lse", point.dtype)
    worst = 0.0
    for dtype in (torch.int32, torch.int64):
        result = lab.ops.sparse_attention(k_rows=k, indices=lab.tensor([[ids]] * 2, dtype), **args)
        lab.synchronize()
        worst = max(worst, check_attention({}, result, want, point.dtype, limits))
    return worst


def _bad() -> Case:
    point = Sparse(pattern="valid", extra="half")
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "indices: beyond the pool": lambda lab, args: {"indices": args["indices"] + 10_000},
        "indices: -2": lambda lab, args: {"indices": torch.full_like(args["indices"], -2)},
        "indices.dtype": lambda lab, args: {"indices": args["indices"].float()},
        "indices.shape": lambda lab, args: {"indices": args["indices"][1:]},
        "extra_indices: beyond": lambda lab, args: {"extra_indices": args["extra_indices"] + 10_000},
        "extra_k: without indices": lambda lab, args: {"extra_indices": None},
        "extra_k.dtype": lambda lab, args: {"extra_k": args["extra_k"].double()},
        "q.dtype": lambda lab, args: {"q": args["q"].to(torch.int32)},
        "k_rows.shape": lambda lab, args: {"k_rows": args["k_rows"][..., :100]},
        "k_rows.dtype": lambda lab, args: {"kv_format": "fp8_ds_mla"},
        "kv_format": lambda lab, args: {"kv_format": "fp4"},
        "v_dim": lambda lab, args: {"v_dim": 0},
        "scale": lambda lab, args: {"scale": math.nan},
        "out.shape": lambda lab, args: {"out": args["out"][..., :5]},
        "lse.dtype": lambda lab, args: {"lse": args["lse"].double()},
    }
    return bad_inputs(OP, partial(_build, point), changes, point.params)
