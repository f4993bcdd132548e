"""Deliberately wrong backends that ignore one parameter: the reference, called with the usual value instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baige_device.ops import contract

Args = Mapping[str, Any]
Op = Callable[..., Any]

__all__ = ["HINTS", "IGNORED", "ON_RANKS", "Ignored", "ignoring"]


@dataclass(frozen=True)
class Ignored:
    """`usual` replaces the parameter whenever it is given; each of the cases must fail on its own."""

    op: str
    parameter: str
    usual: Callable[[Args], Any]
    cases: tuple[str, ...]
    to: str = "default"

    @property
    def name(self) -> str:
        return f"{self.op}-{self.parameter}-{self.to}"


def ignoring(ignored: Ignored) -> Callable[[Op], Op]:
    """What turns the reference of the op into the backend that ignores the parameter."""
    signature = inspect.signature(contract(ignored.op).signature)

    def mutation(op: Op) -> Op:
        def broken(*args: Any, **rest: Any) -> Any:
            given = signature.bind(*args, **rest)
            if given.arguments.get(ignored.parameter) is not None:
                given.arguments[ignored.parameter] = ignored.usual(given.arguments)
            return op(*given.args, **given.kwargs)

        return broken

    return mutation


def _is(value: Any) -> Callable[[Args], Any]:
    return lambda args: value


def _by_head_size(args: Args) -> float:
    return float(args["q"].shape[-1] ** -0.5)


def _by_value_size(args: Args) -> float:
    return float((args["v_dim"] or args["v_rows"].shape[-1]) ** -0.5)


def _normalised(weights: Tensor) -> Tensor:
    """Router weights that sum to 1, as most models' do."""
    return weights / weights.nan_to_num().sum(-1, keepdim=True).clamp(min=1e-9)


def _batch_normalised(args: Args) -> Any:
    batch = args["batch"]
    if batch.topk_weights is None:
        return batch
    return replace(batch, topk_weights=_normalised(batch.topk_weights))


_DEEPSEEK = 192**-0.5
_PAGED = ("mixed-bfloat16", "decode-float16", "mla-small", "length-17", "head-size-128-128", "no-hints")
_SPARSE = ("mla-half", "mla-page-gap", "gqa-half", "gqa-ragged-heads", "fp8-half", "fp8-page-gap", "mla-extra-half")

IGNORED = (
    Ignored("host_alloc", "num_bytes", _is(4096), ("bytes-1", "bytes-4097")),
    Ignored("uva_sparse_gather", "count", _is(None), ("count-zero-requests-3", "count-partial-requests-0")),
    Ignored("uva_sparse_gather", "dst_offsets", _is(None), ("dst-offsets-int32-requests-3",)),
    Ignored("uva_sparse_scatter", "count", _is(None), ("count-zero-requests-3", "count-partial-requests-0")),
    Ignored("hot_cache_resolve", "out", _is(None), ("mid-life",)),
    Ignored("quantize_blocks", "block", _is((128, 128)), ("fp8_e4m3-bfloat16", "int8_absmax-block-1-0")),
    Ignored("quantize_blocks", "block", lambda args: (1, 0), ("fp8_e4m3-bfloat16",), "rows"),
    Ignored("quantize_blocks", "wire", _is("fp8_e4m3"), ("int8_absmax-bfloat16", "bf16-float32")),
    Ignored("quantize_blocks", "name", _is(""), ("fp8_e4m3-nan-named", "int8_absmax-inf-named")),
    Ignored("dequantize_blocks", "block", _is((128, 128)), ("fp8_e4m3-bfloat16", "fp8_e4m3-block-1-0")),
    Ignored("dequantize_blocks", "dtype", _is(torch.bfloat16), ("fp8_e4m3-result-allocated",)),
    Ignored("dequantize_blocks", "out", _is(None), ("fp8_e4m3-bfloat16",)),
    Ignored("fp8_all_gather", "out", _is(None), ("one-rank-7-bytes",)),
    Ignored("attend_paged", "scale", _by_head_size, (*_PAGED, "mla-scale-deepseek", "soft-cap")),
    Ignored("attend_paged", "scale", _is(_DEEPSEEK), (*_PAGED, "mla-page-64", "scale-usual"), "deepseek"),
    Ignored("attend_paged", "v_dim", lambda args: args["q"].shape[-1], ("mla-small",)),
    Ignored("attend_paged", "v_dim", _is(512), ("mla-small",), "512"),
    Ignored("attend_paged", "causal", _is(True), ("bidirectional",)),
    Ignored("attend_paged", "window", _is(0), ("window-1", "window-8", "window-decode", "soft-cap-window")),
    Ignored("attend_paged", "window", _is(4096), ("window-8",), "4096"),
    Ignored("attend_paged", "logits_soft_cap", _is(0.0), ("soft-cap", "soft-cap-window")),
    Ignored("attend_paged", "logits_soft_cap", lambda args: args["logits_soft_cap"] and 50.0, ("soft-cap",), "50"),
    Ignored("attend_paged", "out", _is(None), ("length-17",)),
    Ignored("attend_paged", "lse", _is(None), ("length-17",)),
    Ignored("sparse_attention", "scale", _by_head_size, (*_SPARSE, "mla-scale-deepseek")),
    Ignored("sparse_attention", "scale", _by_value_size, ("mla-scale-usual", "mla-half"), "values"),
    Ignored("sparse_attention", "scale", _is(_DEEPSEEK), (*_SPARSE, "mla-scale-usual"), "deepseek"),
    Ignored("sparse_attention", "v_dim", lambda args: args["q"].shape[-1], ("mla-small", "mla-half")),
    Ignored("sparse_attention", "v_dim", _is(512), ("mla-small",), "512"),
    Ignored("sparse_attention", "kv_format", _is("plain"), ("fp8-half",)),
    Ignored("sparse_attention", "out", _is(None), ("mla-half",)),
    Ignored("sparse_attention", "lse", _is(None), ("mla-half",)),
    Ignored("merge_attention", "out", _is(None), ("bfloat16",)),
    Ignored("merge_attention", "lse", _is(None), ("bfloat16",)),
    Ignored("index_topk", "topk", _is(2048), ("mixed-bfloat16", "topk-63")),
    Ignored(
        "index_topk",
        "k_scales",
        lambda args: torch.ones_like(args["k_scales"]),
        ("bf16-with-scales", "mixed-float8_e4m3fn", "mixed-int8"),
    ),
    Ignored("index_topk", "out", _is(None), ("length-2",)),
    Ignored("moe_dispatch", "num_experts", lambda args: args["num_experts"] + 8, ("flat-tokens-2", "masked-tokens-2")),
    Ignored("moe_dispatch", "layout", _is("flat"), ("masked-tokens-2", "expert_major-tokens-2")),
    Ignored("moe_dispatch", "max_tokens_per_rank", _is(1024), ("flat-over-capacity", "masked-tokens-2")),
    Ignored("moe_dispatch", "alignment", _is(1), ("expert_major-alignment-8", "expert_major-alignment-128")),
    Ignored("moe_dispatch", "alignment", _is(16), ("expert_major-tokens-2", "expert_major-alignment-8"), "16"),
    Ignored("moe_dispatch", "x_scales", _is(None), ("flat-scaled-fp8", "masked-scaled-int8")),
    Ignored(
        "moe_dispatch",
        "topk_weights",
        lambda args: _normalised(args["topk_weights"]),
        ("flat-tokens-2", "flat-topk-1-of-8"),
        "normalised",
    ),
    Ignored("moe_expert_ffn", "activation", _is("silu"), ("flat-gelu", "masked-gelu-float32")),
    Ignored("moe_expert_ffn", "activation", _is("gelu"), ("flat-bfloat16", "masked-float16"), "gelu"),
    Ignored("moe_expert_ffn", "batch", _batch_normalised, ("flat-bfloat16", "flat-one-expert"), "normalised"),
    Ignored("moe_combine", "out", _is(None), ("flat-tokens-2",)),
)
"""Parameter of an op -> what a careless kernel has built in."""

HINTS = {
    ("uva_sparse_gather", "max_sms"),
    ("uva_sparse_scatter", "max_sms"),
    ("attend_paged", "max_query_tokens"),
    ("attend_paged", "max_seq_tokens"),
    ("sparse_attention", "reserved_sms"),
    ("index_topk", "max_query_tokens"),
    ("index_topk", "max_seq_tokens"),
}
"""(op, parameter) that may be ignored."""

ON_RANKS = {("fp8_all_gather", "group"), ("fp8_all_gather", "shard_bytes"), ("moe_dispatch", "group")}
"""(op, parameter) that has one meaningful value on one rank."""
