"""Attention kernels. They write only rows that see a key; a sparse prefill row without one becomes NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from kunlun_emulator.checks import contiguous, dtype, expect, host_device_pair, kernel, shape
from kunlun_emulator.state import STATE
from torch import Tensor

__all__ = [
    "attention_merge_stage",
    "fwd_kvcache_mla",
    "prefill_attention",
    "sparse_prefill_fwd_opt",
    "speculative_attention",
]

HALF = (torch.bfloat16, torch.float16)
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)


def softmax_rows(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[..., S]` logits and `[..., S, Dv]` values -> average, row maximum, row sum of exp(logit - maximum)."""
    peak = logits.max(-1).values
    weights = torch.exp(logits - peak.unsqueeze(-1))
    total = weights.sum(-1)
    return (weights.unsqueeze(-2) @ values).squeeze(-2) / total.unsqueeze(-1), peak, total


@kernel
def fwd_kvcache_mla(
    q_c: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lod_cpu: Tensor,
    out: Tensor,
    max_logits: Tensor,
    p_sums: Tensor,
    softmax_scale: float,
    max_seq_kv: int,
    q_r: Any = None,
    pe_cache: Any = None,
    use_xfa_boost: bool = False,
    kv_lod_xpu: Tensor | None = None,
) -> None:
    op = "fwd_kvcache_mla"
    expect(q_c.dim() == 4 and q_c.shape[1] <= 2, op, f"sq <= 2, got q_c {list(q_c.shape)}")
    requests, queries, heads, _ = q_c.shape
    shape(op, "q_c", q_c, -1, -1, -1, 576)
    shape(op, "kv_cache", kv_cache, -1, 576)
    dtype(op, HALF, q_c=q_c, kv_cache=kv_cache, out=out)
    dtype(op, torch.int32, indices=indices)
    dtype(op, torch.float32, max_logits=max_logits, p_sums=p_sums)
    shape(op, "indices", indices, requests, queries, -1)
    shape(op, "out", out, requests, queries, heads, 512)
    shape(op, "max_logits", max_logits, requests, queries, heads)
    shape(op, "p_sums", p_sums, requests, queries, heads)
    contiguous(op, q_c=q_c, kv_cache=kv_cache, indices=indices, out=out, max_logits=max_logits, p_sums=p_sums)
    lengths = host_device_pair(op, "kv_lod", kv_lod_cpu, kv_lod_xpu, requests)
    expect(max(lengths) <= max_seq_kv, op, f"kv_lod {max(lengths)} > max_seq_kv {max_seq_kv}")
    for request in range(requests):
        for query in range(queries):
            rows = indices[request, query].long()
            live = (rows >= 0) & (rows < kv_cache.shape[0])
            if STATE.profile.kv_lod == "row_ids":
                live &= rows < lengths[request]
            elif STATE.profile.kv_lod == "positions":
                live &= torch.arange(rows.numel()) < lengths[request]
            if not live.any():
                continue
            keys = kv_cache[rows[live]].float()
            logits = q_c[request, query].float() @ keys.T * softmax_scale
            average, peak, total = softmax_rows(logits, keys[:, :512].expand(heads, -1, -1))
            out[request, query] = average.to(out.dtype)
            max_logits[request, query] = peak
            p_sums[request, query] = total


@kernel
def sparse_prefill_fwd_opt(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
    sm_scale: float,
    qlod_cpu: Tensor,
    qlod_xpu: Tensor,
    kvlod_cpu: Tensor,
    kvlod_xpu: Tensor,
    d_v: int = -1,
    is_causal: bool = True,
    use_xfa_boost: bool = False,
    side_stream: int = -1,
    p_out: Any = None,
) -> None:
    op = "sparse_prefill_fwd_opt"
    tokens, heads, _ = q.shape
    expect(d_v in (-1, 512), op, f"d_v must be 512, got {d_v}")
    shape(op, "q", q, -1, -1, 576)
    shape(op, "kv", kv, -1, 576)
    shape(op, "indices", indices, tokens, 1, -1)
    shape(op, "out", out, tokens, heads, 512)
    shape(op, "lse", lse, tokens, heads)
    shape(op, "max_logits", max_logits, tokens, heads)
    dtype(op, HALF, q=q, kv=kv, out=out)
    dtype(op, torch.int32, indices=indices)
    dtype(op, torch.float32, max_logits=max_logits, lse=lse)
    contiguous(op, q=q, kv=kv, indices=indices, out=out, max_logits=max_logits, lse=lse)
    q_lod = host_device_pair(op, "qlod", qlod_cpu, qlod_xpu, qlod_cpu.numel())
    kv_lod = host_device_pair(op, "kvlod", kvlod_cpu, kvlod_xpu, qlod_cpu.numel())
    expect(q_lod[-1] == tokens, op, f"qlod ends at {q_lod[-1]}, not at {tokens}")
    for request in range(len(q_lod) - 1):
        queries = q_lod[request + 1] - q_lod[request]
        length = kv_lod[request + 1] - kv_lod[request]
        for query in range(queries):
            token = q_lod[request] + query
            rows = indices[token, 0].long()
            live = (rows >= 0) & (rows < kv.shape[0])
            # Keys behind the request's stated length are cut off, silently: lengths of the queries alone lose a prefix.
            live &= torch.arange(rows.numel()) < (length - queries + query + 1 if is_causal else length)
            keys = kv[rows[live]].float()
            if not keys.shape[0]:
                out[token], lse[token] = math.nan, math.nan
                continue
            logits = q[token].float() @ keys.T * sm_scale
            average, peak, total = softmax_rows(logits, keys[:, :512].expand(heads, -1, -1))
            out[token] = average.to(out.dtype)
            max_logits[token] = peak
            lse[token] = peak + total.log()


@kernel
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    is_causal: bool,
    is_prefix_cache: bool = False,
    alpha: float = 1.0,
    block_table: Tensor | None = None,
    context_qlen_lod_cpu: Tensor | None = None,
    context_qlen_lod_xpu: Tensor | None = None,
    context_kvlen_lod_cpu: Tensor | None = None,
    context_kvlen_lod_xpu: Tensor | None = None,
    alibi_slopes: Any = None,
    softmax_lse: Tensor | None = None,
    swa_left: int = -1,
    swa_right: int = -1,
    sink: Tensor | None = None,
) -> None:
    op = "prefill_attention"
    tokens, heads, size = q.shape
    expect(size in HEAD_SIZES, op, f"head size {size}")
    dtype(op, HALF, q=q, k=k, v=v, out=out)
    dtype(op, torch.float32, softmax_lse=softmax_lse, sink=sink)
    dtype(op, torch.int32, block_table=block_table)
    contiguous(op, q=q, k=k, v=v, out=out, block_table=block_table, softmax_lse=softmax_lse)
    shape(op, "out", out, tokens, heads, size)
    expect(k.shape == v.shape and k.shape[-1] == size, op, f"k {list(k.shape)}, v {list(v.shape)}, head size {size}")
    assert context_qlen_lod_cpu is not None
    count = context_qlen_lod_cpu.numel()
    q_lod = host_device_pair(op, "context_qlen_lod", context_qlen_lod_cpu, context_qlen_lod_xpu, count)
    kv_lod = host_device_pair(op, "context_kvlen_lod", context_kvlen_lod_cpu, context_kvlen_lod_xpu, count)
    expect(q_lod[-1] == tokens, op, f"qlod ends at {q_lod[-1]}, not at {tokens}")
    if softmax_lse is not None:
        shape(op, "softmax_lse", softmax_lse, tokens, heads)
    if is_prefix_cache:
        expect(block_table is not None and k.dim() == 4 and k.shape[2] in (64, 128), op, "pages of 64 or 128")
    else:
        expect(k.dim() == 3 and k.shape[0] >= kv_lod[-1], op, f"k {list(k.shape)} for {kv_lod[-1]} tokens")
    for request in range(count - 1):
        start, stop = q_lod[request], q_lod[request + 1]
        length = kv_lod[request + 1] - kv_lod[request]
        if length == 0 or start == stop:
            continue
        keys, values = (_request_rows(pool, block_table, request, kv_lod, is_prefix_cache) for pool in (k, v))
        _dense(
            q[start:stop],
            keys,
            values,
            alpha / math.sqrt(size),
            is_causal,
            swa_left,
            swa_right,
            out[start:stop],
            None if softmax_lse is None else softmax_lse[start:stop],
        )


def _request_rows(pool: Tensor, table: Tensor | None, request: int, kv_lod: list[int], paged: bool) -> Tensor:
    """fp32 `[S, G, D]`."""
    length = kv_lod[request + 1] - kv_lod[request]
    if not paged:
        return pool[kv_lod[request] : kv_lod[request] + length].float()
    assert table is not None
    blocks = -(-length // pool.shape[2])
    return pool[table[request, :blocks].long()].transpose(1, 2).flatten(0, 1)[:length].float()


def _dense(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    queries, heads, _ = q.shape
    repeat = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    logits = torch.einsum("thd,shd->ths", q.float(), keys) * scale
    own = torch.arange(queries).unsqueeze(1) + keys.shape[0] - queries
    other = torch.arange(keys.shape[0])
    hidden = torch.zeros(queries, keys.shape[0], dtype=torch.bool)
    if causal:
        hidden |= other > own
    if left >= 0:
        hidden |= other < own - left + (1 if STATE.profile.window_counts_self else 0)
    if right >= 0:
        hidden |= other > own + right
    logits = logits.masked_fill(hidden.unsqueeze(1), -math.inf)
    shift = logits.max(-1, keepdim=True).values
    weights = torch.exp(logits - shift)
    weights = torch.where(hidden.unsqueeze(1), 0.0, weights)
    # Masked keys are not read, as a tiled kernel that stops at the length does not read them.
    shown = torch.where(hidden.all(0).view(-1, 1, 1), 0.0, values)
    out.copy_(torch.einsum("ths,shd->thd", weights / weights.sum(-1, keepdim=True), shown))
    if lse is not None:
        lse.copy_(shift.squeeze(-1) + weights.sum(-1).log())


@kernel
def speculative_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens_cpu: Tensor,
    context_lens_xpu: Tensor,
    batch_num: int,
    qlen: int,
    max_context_len: int,
    head_num: int,
    head_dim: int,
    scale: float,
    kv_head_num: int,
    block_size: int,
    max_num_blocks_per_seq: int,
    max_window_size: int = -1,
    block_tables: Tensor | None = None,
    sink: Tensor | None = None,
) -> None:
    op = "speculative_attention"
    expect(batch_num < 1024, op, f"batch {batch_num} >= 1024")
    contiguous(op, q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    lengths = host_device_pair(op, "context_lens", context_lens_cpu, context_lens_xpu, batch_num)
    for request, length in enumerate(lengths):
        if length:
            kv_lod = [0] * (request + 1) + [length]
            keys, values = (_request_rows(pool, block_tables, request, kv_lod, True) for pool in (k_cache, v_cache))
            rows = slice(request * qlen, (request + 1) * qlen)
            left = max_window_size - 1 if max_window_size > 0 else -1
            _dense(q[rows], keys, values, scale, True, left, -1, out[rows], None)


@kernel
def attention_merge_stage(
    prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, out: Tensor, out_lse: Tensor
) -> None:
    """The textbook formula: an output of NaN or an LSE of -inf on both sides gives NaN."""
    op = "attention_merge_stage"
    tokens, heads, _ = prefix_out.shape
    for name, tensor in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse), ("out_lse", out_lse)):
        shape(op, name, tensor, tokens, heads)
        dtype(op, torch.float32, **{name: tensor})
    dtype(op, HALF, prefix_out=prefix_out, suffix_out=suffix_out, out=out)
    contiguous(op, prefix_out=prefix_out, suffix_out=suffix_out, out=out, prefix_lse=prefix_lse, suffix_lse=suffix_lse)
    peak = torch.maximum(prefix_lse, suffix_lse)
    left, right = torch.exp(prefix_lse - peak), torch.exp(suffix_lse - peak)
    total = left + right
    merged = prefix_out.float() * left.unsqueeze(2) + suffix_out.float() * right.unsqueeze(2)
    out.copy_(merged / total.unsqueeze(2))
    out_lse.copy_(peak + total.log())
