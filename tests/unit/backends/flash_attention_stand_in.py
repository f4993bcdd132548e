"""What stands in for FlashAttention 3's op on CPU: its argument lists, its demands, and what it leaves unwritten."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from baige_device.backends.cuda.flash_attention_library import FlashAttention, adapt
from baige_device.ops.attend_paged.reference import attend_paged as reference

__all__ = ["ENGINE", "PACKAGE", "calls", "register", "stand_in"]

_SHARED = """Tensor{q} q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor{out}? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float{none} softmax_scale, bool is_causal, int window_size_left, int window_size_right,{chunk}
    float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
    int sm_margin"""
ENGINE = (
    _SHARED.format(q="!", out="!", none="", chunk="")
    + ", Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
)
PACKAGE = _SHARED.format(q="", out="(out!)", none="?", chunk=" int attention_chunk,").replace(
    "int sm_margin", "int sm_margin = 0"
)
calls: list[dict[str, Any]] = []
"""The named values of every call, oldest first."""
_libraries: list[torch.library.Library] = []


def register(namespace: str, arguments: str, returns: str = "Tensor[]") -> Any:
    """Define `namespace::fwd` with these arguments on CPU."""
    library = torch.library.Library(namespace, "DEF")
    library.define(f"fwd({arguments}) -> {returns}")
    op = getattr(torch.ops, namespace).fwd
    names = [argument.name for argument in op.default._schema.arguments]
    library.impl("fwd", lambda *values: _forward(**dict(zip(names, values, strict=False))), "CPU")
    _libraries.append(library)  # its ops live as long as it does
    return op


@functools.cache
def stand_in() -> FlashAttention:
    found = adapt("stand-in", register("baige_test_flash_attention", ENGINE))
    assert found is not None
    return found


def _forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_v: Tensor | None,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    page_table: Tensor,
    leftpad_k: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    num_splits: int,
    **others: Any,
) -> list[Tensor]:
    calls.append({"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "num_splits": num_splits, "q_v": q_v})
    calls[-1] |= {"leftpad_k": leftpad_k, "others": others}
    for table in (cu_seqlens_q, seqused_k, page_table):
        assert table.dtype == torch.int32
        assert table.stride(-1) == 1
    for tensor in (q, k, v, *([] if q_v is None else [q_v]), *([] if out is None else [out])):
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(-1) == 1
    assert not any(stride % 8 for tensor in (q, k, v) for stride in tensor.stride()[:-1])
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    assert window_size_right == (0 if is_causal else -1)
    assert num_splits >= 1
    full_q, full_k = (q, k) if q_v is None else (torch.cat((q_v, q), -1), torch.cat((v, k), -1))
    found, lse = reference(
        full_q,
        full_k,
        v,
        page_table,
        cu_seqlens_q,
        seqused_k,
        scale=softmax_scale,
        causal=is_causal,
        window=window_size_left + 1,
        logits_soft_cap=softcap,
    )
    if leftpad_k is None and k.shape[1] >= 64 and max_seqlen_q * (q.shape[1] // k.shape[2]) > 64:
        found[...] = torch.nan  # it may read whole pages, and the tests' pages are full of NaN
    else:
        assert leftpad_k is None or not leftpad_k.any()
    rows = int(cu_seqlens_q[-1])
    result = torch.empty_like(found) if out is None else out
    result[:rows] = found[:rows]
    result[rows:] = torch.nan
    lse[rows:] = torch.nan
    return [result, lse.T.contiguous(), torch.empty(0), torch.empty(0)]
