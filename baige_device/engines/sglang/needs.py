"""What a model asks of the ops, from SGLang's model configuration."""

from __future__ import annotations

from typing import Any

from baige_device.engines.sglang.ledger import HISPARSE_POOL, LEDGER
from baige_device.registry.offers import Need
from baige_device.settings import load_settings

__all__ = ["MOE_LAYOUT", "model_needs", "serves_hisparse"]

MOE_LAYOUT = "expert_major"


def model_needs(runner: Any, *, attention: bool, experts: bool) -> list[Need]:
    """The needs of one worker, with head counts per rank; `attention` and `experts`: which of them are ours."""
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
    from sglang.srt.runtime_context import get_parallel

    config = runner.model_config
    tp = get_parallel().attn_tp_size
    dtype = str(config.dtype).removeprefix("torch.")
    who = f"{(config.hf_config.architectures or ['the model'])[0]} in SGLang"
    heads = int(config.get_num_attention_heads(tp))
    mla = config.attention_arch == AttentionArch.MLA
    if mla:
        size, v_size, groups = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank, 1
    else:
        size, v_size, groups = config.head_dim, config.v_head_dim, int(config.get_num_kv_heads(tp))
    shape = {
        "dtype": dtype,
        "head_size": int(size),
        "v_head_size": int(v_size),
        "num_q_heads": heads,
        "num_kv_heads": groups,
    }
    write = Need("kv_write", who, {"dtype": dtype, "head_size": int(size), "num_kv_heads": groups})
    needs = []
    if is_deepseek_dsa(config.hf_config):
        needs.append(write)
        topk = int(config.hf_config.index_topk)
        needs.append(Need("sparse_attention", who, {**shape, "topk": topk, "kv_format": "plain"}))
        keys = {"dtype": dtype, "head_size": int(config.hf_config.index_head_dim)}
        needs.append(Need("kv_write", who, {**keys, "num_kv_heads": 1}))
        index = {**keys, "topk": topk, "num_q_heads": int(config.hf_config.index_n_heads)}
        needs.append(Need("index_topk", who, index))
        if serves_hisparse(runner):
            needs += _hisparse_needs(config.dtype.itemsize * int(size), shape)
    elif attention or mla:  # SGLang has no MLA of its own without an accelerator
        window = int(config.sliding_window_size or 0)
        soft_cap = float(getattr(config.hf_text_config, "attn_logit_softcapping", None) or 0.0)
        needs += [write, Need("attend_paged", who, {**shape, "window": window, "soft_cap": soft_cap})]
    if experts and _routed_experts(config.hf_text_config):
        needs += [Need(op, who, {"dtype": dtype, "layout": MOE_LAYOUT}) for op in _MOE_OPS]
    return needs


def serves_hisparse(runner: Any) -> bool:
    """Whether this worker's HiSparse runs on our ops; on a platform that is not ours it is SGLang's own."""
    return bool(runner.enable_hisparse) and HISPARSE_POOL in LEDGER.applied


def _hisparse_needs(row_bytes: int, attention: dict[str, Any]) -> list[Need]:
    who = "HiSparse in SGLang"
    copies = [Need(op, who, {"row_bytes": row_bytes}) for op in ("uva_sparse_gather", "uva_sparse_scatter")]
    needs = [Need("host_alloc", who), Need("hot_cache_resolve", who), *copies]
    if load_settings().hisparse.overlap:
        merged = {"dtype": attention["dtype"], "v_head_size": attention["v_head_size"]}
        needs.append(Need("merge_attention", f"{who} with hisparse.overlap", merged))
    return needs


_MOE_OPS = ("moe_dispatch", "moe_expert_ffn", "moe_combine")
_EXPERT_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")


def _routed_experts(config: Any) -> int:
    return max(int(getattr(config, field, 0) or 0) for field in _EXPERT_FIELDS)
