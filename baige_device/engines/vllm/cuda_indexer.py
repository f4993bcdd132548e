"""DSA's top-k on NVIDIA through `index_topk`, on the host's own fp8 index cache.

Only when a tier is named (`BAIGE_OPS=index_topk=portable`): the host's DeepGEMM kernels are faster than the portable.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from baige_device.engines.vllm.ledger import LEDGER
from baige_device.registry.table import OpTable

__all__ = ["INDEXER_CALL", "index_views", "mount_index"]

INDEXER_CALL = "vllm.models.deepseek_v32.attention:sparse_attn_indexer"


def mount_index(features: Any) -> None:
    """Replace the host's scoring and selection."""
    LEDGER.patch(INDEXER_CALL, functools.partial(_replaced, features.ops))


def index_views(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Index keys float8 `[P, N, D]` and their scales fp32 `[P, N]` of the host's cache uint8 `[P, N, D + 4]`.

    A page holds N keys and then N scales, so a row of the cache tensor is not one token's.
    """
    pages, tokens, _ = cache.shape
    stride, offset = cache.stride(0), cache.storage_offset()
    keys = cache.as_strided((pages, tokens, head_size), (stride, head_size, 1), offset)
    scales = cache.as_strided((pages, 4 * tokens), (stride, 1), offset + tokens * head_size)
    return keys.view(torch.float8_e4m3fn), scales.view(torch.float32)


def _replaced(ops: OpTable, original: Any) -> Any:
    from vllm.forward_context import get_forward_context

    def sparse_attn_indexer(
        hidden_states: Tensor,
        k_cache_prefix: str,
        kv_cache: Tensor,
        q_quant: Tensor,
        q_scale: Tensor | None,
        k: Tensor | None,
        weights: Tensor,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        context = get_forward_context()
        layers = context.attn_metadata
        sharded = options.get("use_pcp") or options.get("dcp_world_size", 1) > 1
        if not isinstance(layers, dict) or sharded or k is not None or q_scale is not None:
            return original(hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, *rest, **options)
        _, _, topk, head_size, _, _, buffer = rest
        batch = layers[k_cache_prefix]
        attention = layers[k_cache_prefix.removesuffix(".indexer.k_cache") + ".attn"]
        keys, scales = index_views(kv_cache, head_size)
        tokens = min(q_quant.shape[0], attention.num_actual_tokens)
        ops.index_topk(
            q_quant[:tokens],
            weights[:tokens],
            keys,
            batch.block_table,
            attention.query_start_loc,
            attention.seq_lens,
            topk=topk,
            k_scales=scales,
            max_query_tokens=attention.max_query_len,
            max_seq_tokens=attention.max_seq_len,
            out=buffer[:tokens, :topk],
        )
        return buffer

    return sparse_attn_indexer
