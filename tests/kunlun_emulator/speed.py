"""`torch.ops.xspeedgate_ops` of the chosen profile, as registered torch ops with schemas written out."""

from __future__ import annotations

import torch
from kunlun_emulator import indexer, moe, transfer
from kunlun_emulator.state import STATE

__all__ = ["register", "unregister"]

_SCHEMAS = {
    "transfer_kv_per_layer_mla": (
        "(Tensor src, Tensor(a!) dst, Tensor src_indices, Tensor dst_indices, int item_size, int block_quota=2, "
        "int num_warps_per_block=32) -> ()",
        transfer.transfer_kv_per_layer_mla,
    ),
    "batch_memcpy": ("(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes) -> ()", transfer.batch_memcpy),
    "gather_paged_scale": (
        "(Tensor kv_cache, Tensor block_tables, int page_size, int head_dim, int max_seq_len, int scale_offset, "
        "Tensor context_lens) -> Tensor",
        indexer.gather_paged_scale,
    ),
    "mask_for_I8_mqa_logits": (
        "(Tensor seq_len_kv, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke, Tensor(a!) logits) -> ()",
        indexer.mask_for_I8_mqa_logits,
    ),
    "topk_per_row": (
        "(Tensor logits, Tensor(a!) srcIndices, int numRows, int stride0, int stride1, int topK, Tensor? rowStarts, "
        "Tensor? rowEnds, Tensor? seqLens, int? next_n) -> ()",
        indexer.topk_per_row,
    ),
    "moe_pre_small": (
        "(Tensor topk_ids, int num_experts, bool index_have_neg=False, bool sort_mode=True, Tensor? x=None) -> "
        "(Tensor, Tensor, Tensor)",
        moe.moe_pre_small,
    ),
}
_library: torch.library.Library | None = None


def register() -> None:
    """Register what the profile has; replaces what was registered before."""
    global _library
    unregister()
    _library = torch.library.Library("xspeedgate_ops", "FRAGMENT")
    for name, (schema, function) in _SCHEMAS.items():
        if f"xspeedgate_ops.{name}" not in STATE.profile.absent:
            _library.define(name + schema)
            _library.impl(name, function, "CompositeExplicitAutograd")


def unregister() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    for name in _SCHEMAS:
        vars(torch.ops.xspeedgate_ops).pop(name, None)
