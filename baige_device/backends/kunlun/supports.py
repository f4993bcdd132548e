"""Which needs an implementation refuses, and why: the limits of the kernels in the words of the needs.

A key that a need leaves out is taken as fine; the implementations check the arguments they get once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from baige_device.backends.kunlun.limits import ATTENTION_HEAD_SIZES, INDEX_HEAD_SIZE, MLA_HEAD_SIZE, MLA_VALUE_SIZE
from baige_device.registry.offers import DeviceInfo, Need, Verdict

__all__ = ["judge"]

Params = Mapping[str, Any]
_NO_FP8 = "Kunlun has no float8 arithmetic and no float8 copies"
_SYNCS = "it reads lengths or a plan on the host, so it cannot be captured in a graph"
_HALF = ("bfloat16", "float16")


def judge(target: str, device: DeviceInfo, need: Need) -> Verdict:
    """Judge one need for the implementation `module:attribute`."""
    reason = _RULES[target](need.params, device)
    return Verdict.no(reason) if reason else Verdict.yes()


def _is_fp8(params: Params) -> bool:
    return any(str(params.get(key, "")).startswith("float8") for key in ("dtype", "cache_dtype", "out_dtype"))


def _dtype_in(params: Params, allowed: tuple[str, ...]) -> str:
    dtype = params.get("dtype")
    if dtype is None or dtype in allowed:
        return ""
    return _NO_FP8 if _is_fp8(params) else f"the kernels take {' or '.join(allowed)}, not {dtype}"


def _anything(params: Params, device: DeviceInfo) -> str:
    return ""


def _synchronising(params: Params, device: DeviceInfo) -> str:
    return _SYNCS if params.get("graph") else ""


def _uncaptured_copy(params: Params, device: DeviceInfo) -> str:
    return "whether this transfer can be captured is open (probe transfer_capture)" if params.get("graph") else ""


def _row_transfer(params: Params, device: DeviceInfo) -> str:
    from baige_device.backends.kunlun import open_questions

    proven = open_questions.ask("transfer_row_granularity", device).proven
    width = params.get("row_bytes")
    if width is not None and (width < min(proven) or width % math.gcd(*proven)):
        return f"rows of {width} bytes are not among the proven sizes {list(proven)} (probe transfer_row_granularity)"
    return _synchronising(params, device)


def _wire(params: Params, device: DeviceInfo) -> str:
    wire = params.get("wire", "int8_absmax")
    if wire == "bf16":
        return "the wire is int8_absmax; bf16 weights need no quantisation, gather their bytes as they are"
    if wire != "int8_absmax":
        return f"the wire is int8_absmax, not {wire}: {_NO_FP8}"
    if _is_fp8(params) and "wire" not in params:
        return _NO_FP8
    return ""


def _quantise(params: Params, device: DeviceInfo) -> str:
    return _wire(params, device) or ("it reports NaN by a sync" if params.get("graph") else "")


def _all_gather(params: Params, device: DeviceInfo) -> str:
    return "whether a BKCL collective can be captured is open (probe collective_overlap)" if params.get("graph") else ""


def _attend(params: Params, device: DeviceInfo) -> str:
    head, value = params.get("head_size", 0), params.get("v_head_size", 0)
    latent = (head, value or MLA_VALUE_SIZE.value) == (MLA_HEAD_SIZE.value, MLA_VALUE_SIZE.value)
    if max(head, value) > ATTENTION_HEAD_SIZES[-1] and (not latent or params.get("mla") is False):
        return f"head sizes above {ATTENTION_HEAD_SIZES[-1]} are served for MLA 576/512 only, not {head}/{value}"
    if params.get("soft_cap"):
        return "the kernels have no soft cap"
    if params.get("window") and params.get("causal") is False:
        return "a window without causality has no kernel"
    return _dtype_in(params, _HALF) or _synchronising(params, device)


def _sparse(params: Params, device: DeviceInfo) -> str:
    if params.get("kv_format", "plain") != "plain":
        return f"kv_format {params['kv_format']}: {_NO_FP8}"
    if params.get("num_kv_heads", 1) != 1 or params.get("mla") is False:
        return "the sparse kernels know one kv head (MLA)"
    head, value = params.get("head_size", MLA_HEAD_SIZE.value), params.get("v_head_size", MLA_VALUE_SIZE.value)
    if (head, value) != (MLA_HEAD_SIZE.value, MLA_VALUE_SIZE.value):
        return f"the sparse kernels take 576/512 columns, not {head}/{value}"
    return _dtype_in(params, _HALF) or _uncaptured(params)


def _uncaptured(params: Params) -> str:
    return "no caller captures the sparse kernels (graphs are piecewise upstream)" if params.get("graph") else ""


def _sparse_portable(params: Params, device: DeviceInfo) -> str:
    if params.get("kv_format", "plain") != "plain" or _is_fp8(params):
        return _NO_FP8
    return ""


def _merge(params: Params, device: DeviceInfo) -> str:
    return _dtype_in(params, _HALF)


def _index(params: Params, device: DeviceInfo) -> str:
    if params.get("head_size", INDEX_HEAD_SIZE.value) != INDEX_HEAD_SIZE.value:
        return f"the indexer kernels take 128 columns, not {params['head_size']}"
    return _dtype_in(params, ("int8",)) or _topk(params) or _synchronising(params, device)


def _topk(params: Params) -> str:
    from baige_device.backends.kunlun import vendor

    if params.get("topk", 2048) != 2048 and not vendor.has("xspeedgate_ops.topk_per_row"):
        return f"this build has only fast_topkv2, which takes k = 2048, not {params['topk']}"
    return ""


def _index_portable(params: Params, device: DeviceInfo) -> str:
    return _NO_FP8 if _is_fp8(params) else _synchronising(params, device)


def _no_fp8(params: Params, device: DeviceInfo) -> str:
    return _NO_FP8 if _is_fp8(params) else ""


def _dispatch(params: Params, device: DeviceInfo) -> str:
    if _is_fp8(params):
        return _NO_FP8
    if params.get("graph") and (params.get("layout") != "masked" or params.get("ranks", 1) != 1):
        return "only the masked layout on one rank has fixed shapes"
    return ""


def _deep_ep(params: Params, device: DeviceInfo) -> str:
    if params.get("ranks", 2) == 1:
        return "one rank exchanges nothing"
    if params.get("dtype") != "int8" or params.get("scale_blocks") != 1:
        return "deep_ep carries int8 rows with one scale each (dtype=int8, scale_blocks=1)"
    return "deep_ep reads counts on the host" if params.get("graph") else ""


def _ffn(params: Params, device: DeviceInfo) -> str:
    return _dtype_in(params, _HALF)


def _combine(params: Params, device: DeviceInfo) -> str:
    exchanges = params.get("ranks", 1) != 1
    return "the exchange over ranks splits by counts on the host" if params.get("graph") and exchanges else ""


_RULES: dict[str, Callable[[Params, DeviceInfo], str]] = {
    "host_alloc:host_alloc": _anything,
    "gather_memcpy:uva_sparse_gather": _uncaptured_copy,
    "gather_memcpy:uva_sparse_scatter": _uncaptured_copy,
    "gather_transfer:uva_sparse_gather": _row_transfer,
    "gather_transfer:uva_sparse_scatter": _row_transfer,
    "gather_staged:uva_sparse_gather": _synchronising,
    "gather_staged:uva_sparse_scatter": _synchronising,
    "resolve:hot_cache_resolve": _anything,
    "quantise:quantize_blocks": _quantise,
    "quantise:dequantize_blocks": _wire,
    "all_gather:fp8_all_gather": _all_gather,
    "attend:attend_paged": _attend,
    "sparse:sparse_attention": _sparse,
    "sparse_portable:sparse_attention": _sparse_portable,
    "partial:merge_attention": _merge,
    "partial:merge_attention_portable": _anything,
    "index:index_topk": _index,
    "index_portable:index_topk": _index_portable,
    "kv_write:kv_write": _no_fp8,
    "kv_write:kv_write_portable": _no_fp8,
    "moe:moe_dispatch": _dispatch,
    "moe_deep_ep:moe_dispatch": _deep_ep,
    "moe_ffn:moe_expert_ffn": _ffn,
    "moe:moe_combine": _combine,
}
