"""The vocabulary of `Need.params`: what one user of an op tells a backend before the op is bound.

Mounts, optimisations and this kit use the same keys, so a backend's `supports` is exercised by the kit with the very
words that an engine will use. Values are plain: numbers, strings, booleans. A key that does not apply is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baige_device.registry.offers import Need

__all__ = ["NEED_KEYS", "case_need", "dtype_name"]

NEED_KEYS: dict[str, str] = {
    "dtype": "element type of the main input (q, weight, values, x, w13), as torch names it: `bfloat16`",
    "cache_dtype": "kv_write: element type of the cache when it differs from `dtype`",
    "out_dtype": "dequantize_blocks: element type of the result",
    "index_dtype": "element type of row ids, slots, keys or block tables: `int32` or `int64`",
    "row_bytes": "gather, scatter: bytes of one row",
    "pool": "gather, scatter: `flat` ([S, W]) or `paged` ([P, N, W])",
    "by_request": "gather, scatter: True for plans [B, M] with a count per request",
    "hot_slots": "hot_cache_resolve: H, slots of one state",
    "topk": "hot_cache_resolve, sparse_attention, index_topk: K; moe_dispatch: experts per token",
    "shared_states": "hot_cache_resolve: True when several rows may name one state",
    "wire": "quantize_blocks, dequantize_blocks: a key of WIRE_FORMATS",
    "block": "quantize_blocks, dequantize_blocks: (rows, columns) of a block, columns 0 for whole rows",
    "ranks": "fp8_all_gather, moe_dispatch, moe_combine: size of the process group",
    "head_size": "attention: D, columns of one key; index_topk: Di",
    "v_head_size": "attention: Dv, columns of one value",
    "num_q_heads": "attention: H, query heads; index_topk: Hi",
    "num_kv_heads": "attention, kv_write: G",
    "mla": "attention: True when the values are the first columns of the keys",
    "page_size": "attend_paged, index_topk, kv_write: N, tokens of one page; 1 is a token table",
    "causal": "attend_paged: False for bidirectional attention",
    "window": "attend_paged: sliding window in tokens, 0 for none",
    "soft_cap": "attend_paged: logits_soft_cap, 0.0 for none",
    "max_query_tokens": "attend_paged, index_topk: the longest query of one request; 1 is pure decode",
    "kv_format": "sparse_attention: `plain` or `fp8_ds_mla`",
    "extra": "sparse_attention: True with a second index set",
    "layout": "moe: `flat`, `expert_major` or `masked`",
    "alignment": "moe_dispatch: row padding of each expert",
    "scale_blocks": "moe_dispatch: scales a row of a quantised payload (columns of `x_scales`)",
    "num_experts": "moe: experts of all ranks",
    "hidden_size": "moe: H",
    "activation": "moe_expert_ffn: `silu` or `gelu`",
    "graph": "True when the call will be captured in a device graph",
}
"""Key -> meaning. The list is closed: a key that is not here is an error in the kit."""


def dtype_name(dtype: object) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def case_need(op: str, case: str, params: Mapping[str, Any]) -> Need:
    """The need that stands for one conformance case.

    Raises:
        ValueError: a key outside `NEED_KEYS`.
    """
    unknown = sorted(set(params) - set(NEED_KEYS))
    if unknown:
        raise ValueError(f"need of case {op}/{case}: unknown keys {unknown}; known: {', '.join(NEED_KEYS)}")
    return Need(op, f"conformance case {case}", dict(params))
