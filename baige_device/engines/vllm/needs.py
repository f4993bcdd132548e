"""What a model will ask of the ops, derived from vLLM's configuration before any layer exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baige_device.engines.vllm.hisparse_options import decode_tokens, hisparse_on, hot_tokens
from baige_device.engines.vllm.options import engine_settings
from baige_device.registry.offers import Need

__all__ = ["MOE_LAYOUT", "attention_needs", "features_of", "needs_of"]

MOE_LAYOUT = "flat"
"""One row per token and rank: the shape that the host's modular kernel expects between dispatch and combine."""

_ATTENTION_OPS = ("attend_paged", "sparse_attention", "kv_write")


def features_of(vllm_config: Any) -> tuple[str, ...]:
    """The ledger features that the platform mounts for this model."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    features = ["core", "platform"]
    if current_platform.device_type == "cpu":
        features.append("cpu")
    if _is_moe(model):
        features.append("moe")
    if _is_dsa(model):
        features.append("dsa")
    if hisparse_on(vllm_config):
        features.append("hisparse")
    if getattr(type(current_platform), "masks_in_torch", False):
        features.append("grammar")
    return tuple(features)


def needs_of(vllm_config: Any) -> list[Need]:
    """The needs of the model's layers on one rank, in the vocabulary of `baige_device.testing.needs`."""
    model = vllm_config.model_config
    who = f"model {model.model}"
    dtype = {"dtype": str(model.dtype).removeprefix("torch.")}
    return [Need(op, who, dtype | params) for op, params in _params(vllm_config)]


def attention_needs(vllm_config: Any) -> list[Need]:
    """The needs of our attention backends alone, where indexer and experts stay the host's."""
    return [need for need in needs_of(vllm_config) if need.op in _ATTENTION_OPS]


def _params(vllm_config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    model = vllm_config.model_config
    if not model.is_attention_free:
        yield from _latent(vllm_config) if model.use_mla else _dense(vllm_config)
    if _is_moe(model):
        yield from _moe(vllm_config)


def _dense(vllm_config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    model = vllm_config.model_config
    head_size, page = model.get_head_size(), vllm_config.cache_config.block_size
    kv_heads = model.get_num_kv_heads(vllm_config.parallel_config)
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    attend = {"page_size": page, "window": model.get_sliding_window() or 0}
    attend["soft_cap"] = float(getattr(model.hf_text_config, "attn_logit_softcapping", None) or 0.0)
    yield "attend_paged", _shape(heads, kv_heads, head_size, head_size) | attend
    yield "kv_write", {"num_kv_heads": kv_heads, "head_size": head_size, "page_size": page}


def _latent(vllm_config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    page = {"page_size": vllm_config.cache_config.block_size}
    attend = _shape(heads, 1, text.kv_lora_rank + text.qk_rope_head_dim, text.kv_lora_rank) | {"mla": True}
    rows = [text.kv_lora_rank, text.qk_rope_head_dim]
    if _is_dsa(model):
        yield "sparse_attention", attend | {"topk": text.index_topk, "kv_format": "plain"}
        index = {"num_q_heads": text.index_n_heads, "head_size": text.index_head_dim, "topk": text.index_topk}
        yield "index_topk", index | page
        if hisparse_on(vllm_config):
            yield from _hisparse(vllm_config, attend["num_q_heads"])
            rows = []
        rows.append(text.index_head_dim)
    else:
        yield "attend_paged", attend | page
    for width in rows:
        yield "kv_write", {"num_kv_heads": 1, "head_size": width} | page


def _hisparse(vllm_config: Any, heads: int) -> Iterator[tuple[str, dict[str, Any]]]:
    model, settings = vllm_config.model_config, engine_settings(vllm_config).hisparse
    text = model.hf_text_config
    row_bytes = (text.kv_lora_rank + text.qk_rope_head_dim) * model.dtype.itemsize
    row = {"row_bytes": row_bytes, "pool": "flat"}
    queries = decode_tokens(vllm_config)
    hot = hot_tokens(vllm_config)
    yield "host_alloc", {}
    yield "uva_sparse_gather", row | {"by_request": True}  # misses
    yield "uva_sparse_gather", row | {"by_request": False}  # context of prompt chunks
    yield "uva_sparse_scatter", row | {"by_request": False}
    shared = {"shared_states": queries > 1, "index_dtype": "int32"}
    yield "hot_cache_resolve", {"topk": text.index_topk, "hot_slots": hot} | shared
    yield "kv_write", {"num_kv_heads": 1, "head_size": row_bytes, "page_size": 1, "dtype": "uint8"}
    if settings.overlap:
        yield "merge_attention", {"num_q_heads": heads, "v_head_size": text.kv_lora_rank}


def _moe(vllm_config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    common = {
        "layout": MOE_LAYOUT,
        "num_experts": int(model.get_num_experts()),
        "hidden_size": int(model.get_hidden_size()),
    }
    exchanges = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    ranks = parallel.data_parallel_size * parallel.tensor_parallel_size if exchanges else 1
    yield "moe_dispatch", common | {"ranks": ranks, "alignment": 1}
    yield "moe_expert_ffn", common
    yield "moe_combine", common | {"ranks": ranks}


def _shape(q_heads: int, kv_heads: int, head_size: int, v_head_size: int) -> dict[str, Any]:
    return {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_size": head_size, "v_head_size": v_head_size}


def _is_moe(model: Any) -> bool:
    return int(model.get_num_experts()) > 0


def _is_dsa(model: Any) -> bool:
    return bool(model.use_mla) and hasattr(model.hf_text_config, "index_topk")
