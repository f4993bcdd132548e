"""Break each documented precondition in the adapter on purpose: the emulator must notice every time.

A mutation is caught when a case that passes on the healthy backend raises (`raises`), or gives a result that the
float64 oracle refuses (`wrong`: the chip would corrupt silently there). The list is the table of docs/kunlun.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import kunlun_emulator
import pytest
import torch
from torch import Tensor

from baige_device.backends.kunlun import (
    attend,
    batch,
    gather_transfer,
    host_alloc,
    index,
    moe,
    moe_ffn,
    moe_sort,
    normalise,
    partial,
    plan,
    quantise,
    sparse,
    vendor,
)
from baige_device.backends.kunlun.limits import Limit
from baige_device.testing import all_cases, open_backend
from baige_device.testing.runner import Outcome, Runner
from tests.unit.kunlun.strict import strict_kit
from tests.unit.kunlun.test_index_int8 import build as index_batch
from tests.unit.kunlun.test_index_int8 import check as check_index

Patch = Callable[[pytest.MonkeyPatch], None]


def _set(owner: Any, name: str, new: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, new)


def _do_not_register(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_alloc, "_register", lambda memory, asked: None)
    patch.setattr(host_alloc, "_unregister", lambda mapping, address, asked: None)


def _limit(owner: Any, name: str, value: int) -> Patch:
    return _set(owner, name, Limit(value, "", "", ""))


def _call(op: str, **changes: Any) -> Patch:
    """The adapter hands a vendor kernel other keyword arguments than it should."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        kernels = dict(vars(vendor.kernel_module()))
        kernels[op] = functools.wraps(kernels[op])(lambda *a, _f=kernels[op], **k: _f(*a, **{**k, **changes}))
        patch.setattr(vendor, "kernel_module", lambda: SimpleNamespace(**kernels))

    return apply


def _sparse_prefill(patch: pytest.MonkeyPatch, change: Callable[[list[Any]], None]) -> None:
    kernels = dict(vars(vendor.kernel_module()))
    real = kernels["sparse_prefill_fwd_opt"]

    def mutated(*args: Any) -> None:
        changed = list(args)
        change(changed)
        real(*changed)

    kernels["sparse_prefill_fwd_opt"] = mutated
    patch.setattr(vendor, "kernel_module", lambda: SimpleNamespace(**kernels))
    patch.setattr(sparse, "SPARSE_DECODE_ROWS", Limit(0, "", "", ""))


def _always_prefill(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sparse, "SPARSE_DECODE_ROWS", Limit(0, "", "", ""))


def _both(*patches: Patch) -> Patch:
    return lambda patch: [apply(patch) for apply in patches] and None


def _same_pair(values: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    pair = torch.tensor(values, dtype=torch.int32, device=device)
    return pair, pair


def _same_constants(count: int, value: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pair = torch.full((count,), value, dtype=torch.int32, device=device)
    return pair, pair


def _empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _no_merge_fix(
    oa: Tensor, la: Tensor, ob: Tensor, lb: Tensor, merged: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    return merged, total


def _deliver_all(result: Tensor, total: Tensor, seen: Any, out: Any, lse: Any) -> tuple[Tensor, Tensor]:
    return result if out is None else out.copy_(result), total if lse is None else lse.copy_(total)


def _set_kv_lod_to_q_lod(args: list[Any]) -> None:
    args[9:11] = args[7:9]


def _set_causal(args: list[Any]) -> None:
    args[12] = True


@dataclass(frozen=True)
class Mutation:
    """One broken precondition. `cases` are kit cases (`op/id`), or `own:NAME` for those of this file."""

    name: str
    apply: Patch
    cases: tuple[str, ...]
    caught_as: str
    profile: str = "torch2.9"


MUTATIONS = (
    Mutation("inputs left strided, cache", _set(normalise, "dense", lambda t: t), ("kv_write/row-1x576",), "raises"),
    Mutation(
        "inputs left strided, parts",
        _set(normalise, "dense", lambda t: t),
        ("merge_attention/strided-parts",),
        "raises",
    ),
    Mutation("slots left int64", _set(normalise, "int32", lambda t: t.contiguous()), ("kv_write/row-1x576",), "raises"),
    Mutation(
        "block table left int64",
        _set(normalise, "int32", lambda t: t.contiguous()),
        ("attend_paged/cache-heads-first", "sparse_attention/mla-int64-index"),
        "raises",
    ),
    Mutation(
        "transfer indices made int32",
        _set(normalise, "int64", lambda t: t.to(torch.int32)),
        ("uva_sparse_gather/row-bytes-656",),
        "raises",
        "torch2.5",
    ),
    Mutation(
        "device lengths given as host lengths",
        _set(normalise, "length_pair", _same_pair),
        ("attend_paged/mixed-bfloat16",),
        "raises",
    ),
    Mutation(
        "device constants given as host lengths",
        _set(normalise, "constant_pair", _same_constants),
        ("sparse_attention/mla-half",),
        "raises",
    ),
    Mutation(
        "outputs not zeroed, masked product",
        _set(normalise, "zeros", _empty),
        ("moe_expert_ffn/masked-bfloat16",),
        "wrong",
    ),
    Mutation(
        "workspace not zeroed, statistic",
        _both(_set(normalise, "zeros", _empty), _limit(moe_sort, "MOE_SMALL_CHOICES", 0)),
        ("moe_dispatch/flat-tokens-129", "moe_dispatch/masked-tokens-129"),
        "raises",
    ),
    Mutation(
        "more than two query tokens a request",
        _set(sparse, "as_requests", lambda q: q.unsqueeze(0)),
        ("sparse_attention/mla-half",),
        "raises",
    ),
    Mutation(
        "absmax given where a scale is",
        _set(normalise, "scale_of_absmax", lambda a: a),
        ("quantize_blocks/int8_absmax-float32",),
        "wrong",
    ),
    Mutation(
        "scale given where absmax is expected",
        _set(normalise, "absmax_of_scale", lambda s: s),
        ("dequantize_blocks/int8_absmax-float32",),
        "wrong",
    ),
    Mutation(
        "alpha without the root of the head size",
        _set(normalise, "prefill_alpha", lambda scale, size: scale),
        ("attend_paged/mixed-bfloat16",),
        "wrong",
    ),
    Mutation(
        "lse as [heads, tokens]",
        _set(normalise, "filled_lse", lambda t, h, d: torch.zeros(h, t, device=d)),
        ("attend_paged/mixed-bfloat16",),
        "raises",
    ),
    Mutation(
        "lse in base 2",
        _set(partial, "lse_of_sums", lambda m, s: torch.where(s > 0, m + torch.log2(s), -torch.inf)),
        ("sparse_attention/mla-half",),
        "wrong",
    ),
    Mutation(
        "query lengths given as kv lengths, dense",
        _set(batch.Batch, "kv_starts", property(lambda b: b.q_starts)),
        ("attend_paged/cache-heads-first", "attend_paged/mixed-bfloat16"),
        "any",
    ),
    Mutation(
        "query lengths given as kv lengths, sparse",
        lambda p: _sparse_prefill(p, _set_kv_lod_to_q_lod),
        ("sparse_attention/mla-half",),
        "wrong",
    ),
    Mutation("causality left on for lists", lambda p: _sparse_prefill(p, _set_causal), ("own:full-lists",), "wrong"),
    Mutation(
        "NaN of empty rows kept",
        _both(_always_prefill, _set(partial, "deliver", _deliver_all)),
        ("sparse_attention/mla-all-minus",),
        "wrong",
    ),
    Mutation(
        "-inf handed to the merge kernel",
        _set(partial, "_without_empty", _no_merge_fix),
        ("merge_attention/both-empty-bfloat16",),
        "wrong",
    ),
    Mutation(
        "window that counts the query twice",
        _set(attend, "window_left", lambda w: w or -1),
        ("attend_paged/window-8",),
        "wrong",
    ),
    Mutation(
        "page size outside 64 and 128",
        _set(attend, "PAGED_BLOCK_TOKENS", (1, 4, 16, 64, 128)),
        ("attend_paged/cache-heads-first", "attend_paged/heads-8-kv-1", "attend_paged/page-4"),
        "raises",
    ),
    Mutation(
        "head size outside the list",
        _set(attend, "ATTENTION_HEAD_SIZES", (16, 80, 88, 200, 256, 320, 576)),
        ("attend_paged/head-size-192-128",),
        "raises",
    ),
    Mutation(
        "heads-first layout flag for tokens-first pages",
        _call("reshape_and_cache_flash", BLHD_LAYOUT=False),
        ("kv_write/row-8x128", "kv_write/row-3x64"),
        "any",
    ),
    Mutation(
        "strided index keys",
        _set(index, "contiguous_pages", lambda cache, pages: (cache, pages)),
        ("own:index-decode",),
        "wrong",
    ),
    Mutation("max_context_len off the page", _set(index, "page_aligned", lambda n: n), ("own:index-decode",), "raises"),
    Mutation("rows as wide as all keys", _call("I8_mqa_logits", max_seq_k=-1), ("own:index-prefill",), "wrong"),
    Mutation(
        "k other than 2048 for fast_topkv2", _limit(index, "FAST_TOPK", 5), ("own:index-decode",), "raises", "no_topk"
    ),
    Mutation(
        "expert -1 in the sort",
        _set(moe_sort, "without_negative", lambda ids, experts: normalise.int32(ids)),
        ("moe_dispatch/masked-half-minus",),
        "raises",
    ),
    Mutation(
        "row -1 in moe_post",
        _set(moe, "live_choice", lambda index, live: index),
        ("moe_combine/masked-half-minus",),
        "raises",
    ),
    Mutation(
        "activation inside the product",
        _call("moe_fc", act="SWISH_GLU"),
        ("moe_expert_ffn/expert_major-bfloat16",),
        "raises",
    ),
    Mutation(
        "host memory not registered, transfer",
        _do_not_register,
        ("uva_sparse_gather/row-bytes-656",),
        "raises",
        "torch2.5",
    ),
    Mutation(
        "host memory not registered, memcpy",
        _do_not_register,
        ("uva_sparse_scatter/row-bytes-656",),
        "raises",
    ),
    Mutation(
        "registration off 2 MiB", _limit(host_alloc, "HOST_REGISTER_ALIGN", 4096), ("host_alloc/bytes-4097",), "raises"
    ),
    Mutation(
        "padding of a plan sent to the transfer",
        _set(gather_transfer, "on_host", lambda s, d, c: tuple(r.cpu() for r in plan.live_rows(s, d, c))),
        (
            "uva_sparse_gather/count-partial-requests-3",
            "uva_sparse_gather/minus-skip-all-flat",
            "uva_sparse_gather/minus-half-flat",
        ),
        "any",
        "torch2.5",
    ),
    Mutation(
        "evenly spaced rows assumed",
        _set(gather_transfer, "row_step", lambda pool: 1),
        ("uva_sparse_gather/paged-interleaved-7", "uva_sparse_gather/flat-gap-656"),
        "any",
        "torch2.5",
    ),
    Mutation(
        "float8 on the way",
        _set(quantise, "_to_rows", lambda m, b: m.to(torch.float8_e4m3fn)),
        ("quantize_blocks/int8_absmax-float32",),
        "raises",
    ),
    Mutation(
        "masked product given int64 counts",
        _set(moe_ffn.normalise, "int32", lambda t: t.long()),
        ("moe_expert_ffn/masked-bfloat16",),
        "raises",
    ),
)


def _run(mutation: Mutation, patch: pytest.MonkeyPatch | None) -> list[Outcome]:
    """The mutation's cases. The vendor build was judged before, so a mutated adapter cannot hide behind a self-test."""
    backend, device = open_backend("kunlun")
    for op in (
        "kv_write",
        "uva_sparse_gather",
        "attend_paged",
        "sparse_attention",
        "moe_dispatch",
        "host_alloc",
        "index_topk",
    ):
        backend.offers(op, device)
    if patch is not None:
        mutation.apply(patch)
    runner = Runner(backend, device, seed=17)
    wanted = set(mutation.cases)
    with strict_kit():
        outcomes = [runner.run(case) for case in all_cases() if case.name in wanted]
    return outcomes + [_own_outcome(name) for name in mutation.cases if name in _OWN]


def _index(queries: int) -> None:
    data = index_batch(queries, fused=True)
    with kunlun_emulator.chip_rules():
        found = index.index_topk(**data, topk=5)
    check_index(found, data, 5)


def _full_lists() -> None:
    """Six queries over all 64 rows of a pool: a causal reading would cut each list but the last."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, 8, 576, generator=generator).to(torch.bfloat16)
    pool = torch.randn(64, 1, 576, generator=generator).to(torch.bfloat16)
    lists = torch.stack([torch.randperm(64, generator=generator) for _ in range(6)]).unsqueeze(1)
    with kunlun_emulator.chip_rules():
        out, _ = sparse.sparse_attention(q, pool, None, lists, scale=0.05, v_dim=512)
    keys = pool.squeeze(1).double()
    want = torch.softmax(q.double() @ keys.T * 0.05, -1) @ keys[:, :512]
    assert ((out.double() - want).abs() / (1 + want.abs())).max() < 0.016


_OWN: dict[str, Callable[[], None]] = {
    "own:index-decode": lambda: _index(1),
    "own:index-prefill": lambda: _index(5),
    "own:full-lists": _full_lists,
}


def _own_outcome(name: str) -> Outcome:
    try:
        _OWN[name]()
    except AssertionError:
        return Outcome("own", name, "failed", reason="Mismatch: the oracle disagrees")
    except kunlun_emulator.ChipError as error:
        return Outcome("own", name, "failed", reason=f"raised ChipError: {error}")
    return Outcome("own", name, "passed")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.name for m in MUTATIONS])
def test_the_emulator_catches(mutation: Mutation) -> None:
    from tests.unit.kunlun.conftest import forget

    with kunlun_emulator.installed(mutation.profile), pytest.MonkeyPatch.context() as patch:
        forget()
        broken = _run(mutation, patch)
    caught = [outcome for outcome in broken if outcome.status == "failed"]
    assert caught, f"not caught: {[(o.case, o.status, o.tier, o.reason) for o in broken]}"
    kinds = {_kind(outcome) for outcome in caught}
    assert mutation.caught_as in kinds or mutation.caught_as == "any", [o.reason for o in caught]


def _kind(outcome: Outcome) -> str:
    return "wrong" if outcome.reason.startswith("Mismatch") else "raises"


@pytest.mark.parametrize("profile", sorted({m.profile for m in MUTATIONS} - {"no_topk"}))
def test_the_same_cases_pass_unbroken(profile: str) -> None:
    from tests.unit.kunlun.conftest import forget

    cases = tuple(dict.fromkeys(case for m in MUTATIONS if m.profile == profile for case in m.cases))
    with kunlun_emulator.installed(profile):
        forget()
        healthy = _run(Mutation("none", lambda patch: None, cases, "any", profile), None)
    assert len(healthy) == len(cases), "a case name of the list does not exist"
    assert {outcome.status for outcome in healthy} == {"passed"}, [o for o in healthy if o.status != "passed"]
