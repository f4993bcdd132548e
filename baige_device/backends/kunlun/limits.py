"""Limits of the vendor's kernels as data: value, unit, and where the number was read.

Adapters split their work by these numbers or refuse a need at start-up; nothing else in the backend states them. No
number was measured on a chip: `open_questions.py` names the probe that can widen it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALL", "Limit"]


@dataclass(frozen=True)
class Limit:
    """One documented bound. `effect` says what the backend does about it."""

    value: int
    unit: str
    source: str
    effect: str


SPARSE_DECODE_QUERY_TOKENS = Limit(
    2,
    "query tokens a request",
    "asserted by the caller of kunlun_ops.fwd_kvcache_mla (vLLM-Kunlun 09869ee)",
    "sparse_attention hands over one query a request",
)
SPARSE_DECODE_ROWS = Limit(
    256,
    "query tokens a call",
    "our choice: the kernel is the decode one; probe sparse_decode_or_prefill decides",
    "sparse_attention uses sparse_prefill_fwd_opt above it",
)
SPARSE_TOPK = Limit(
    2048,
    "list entries a call",
    "the widest list that any caller passes (index_topk of DeepSeek-V3.2)",
    "sparse_attention splits longer lists and merges by LSE",
)
SPARSE_TOPK_ALIGN = Limit(
    64, "list entries", "unknown on hardware; probe sparse_topk_alignment", "sparse_attention pads lists with -1"
)
MLA_HEAD_SIZE = Limit(576, "elements", "fwd_kvcache_mla, sparse_prefill_fwd_opt", "refused when different")
MLA_VALUE_SIZE = Limit(512, "elements", "sparse_prefill_fwd_opt takes no other d_v", "refused when different")
INDEX_PAGE_TOKENS = Limit(64, "tokens a page", "I8_paged_mqa_logits, index cache layout", "pages are regrouped by 64")
INDEX_HEAD_SIZE = Limit(128, "elements", "I8_mqa_logits, I8_paged_mqa_logits", "refused when different")
INDEX_DECODE_QUERY_TOKENS = Limit(
    2,
    "query tokens a request",
    "next_n of I8_paged_mqa_logits as called (one draft token)",
    "index_topk uses I8_mqa_logits above it",
)
INDEX_LOGITS_BYTES = Limit(
    1 << 30, "bytes", "our choice: bound of the fp32 logits buffer", "index_topk works in chunks of query tokens"
)
FAST_TOPK = Limit(2048, "results", "kunlun_ops.fast_topkv2 takes no other k", "topk_per_row for any other k")
MOE_SMALL_CHOICES = Limit(
    768,
    "tokens * top-k",
    "upstream switches from moe_pre_small to moe_pre_sorted above it",
    "the permutation uses the matching kernel",
)
MOE_STATISTIC_ROWS = Limit(12, "clusters", "block_statistic is int32[12, E] (one row a cluster)", "buffer shape")
DEEP_EP_ALIGNMENT = Limit(
    128,
    "rows an expert",
    "expert_alignment of deep_ep's dispatch as called (sglang-kunlun 0.1.0)",
    "passed as it is; the counts that it rounds are not used",
)
HOST_REGISTER_ALIGN = Limit(
    1 << 21, "bytes", "sglang-kunlun registers 2 MiB-aligned start and length", "host_alloc aligns both"
)
SPECULATIVE_BATCH = Limit(
    1023,
    "requests a call",
    "speculative_attention fails for 1024 and more (vLLM-Kunlun issue 477)",
    "attend_paged does not call it (it returns no LSE)",
)

ATTENTION_HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
"""Head sizes of the dense kernels (vLLM-Kunlun); others are padded with zeros to the next one."""

PAGED_BLOCK_TOKENS = (64, 128)
"""Page sizes with which the dense kernels are called upstream; other pages are gathered first."""

ALL: dict[str, Limit] = {name: item for name, item in list(globals().items()) if isinstance(item, Limit)}
