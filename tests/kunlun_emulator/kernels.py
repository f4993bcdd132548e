"""`kunlun_ops` of the chosen profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kunlun_emulator import attention, cache, indexer, moe, quant
from kunlun_emulator.state import STATE

__all__ = ["namespace"]

_ALL: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        attention.attention_merge_stage,
        attention.fwd_kvcache_mla,
        attention.prefill_attention,
        attention.sparse_prefill_fwd_opt,
        attention.speculative_attention,
        cache.concat_and_cache_mla,
        cache.reshape_and_cache_flash,
        indexer.I8_mqa_logits,
        indexer.I8_paged_mqa_logits,
        indexer.fast_topkv2,
        moe.gen_block_statistic,
        moe.m_grouped_gemm_bf16_bf16_bf16_nt_masked,
        moe.moe_fc,
        moe.moe_post,
        moe.moe_pre_sorted,
        moe.swiglu,
        quant.dequant2d_per_token,
        quant.matmul,
        quant.quant2d,
    )
}


def namespace() -> dict[str, Callable[..., Any]]:
    return {name: function for name, function in _ALL.items() if f"kunlun_ops.{name}" not in STATE.profile.absent}
