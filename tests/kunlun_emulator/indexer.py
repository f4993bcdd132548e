"""The int8 indexer: logits and top-k. Index pages hold 64 keys of 128 int8 first and their 64 fp32 scales behind."""

from __future__ import annotations

import math

import torch
from kunlun_emulator.checks import contiguous, dtype, expect, host_device_pair, kernel, shape
from torch import Tensor

__all__ = [
    "I8_mqa_logits",
    "I8_paged_mqa_logits",
    "fast_topkv2",
    "gather_paged_scale",
    "mask_for_I8_mqa_logits",
    "topk_per_row",
]


def _logits(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    """q `[t, H, 128]`, keys `[S, 128]` -> `[t, S]`."""
    products = torch.relu(q.float() @ keys.float().T)
    return (weights.unsqueeze(1) @ products).squeeze(1) * scales


@kernel
def I8_mqa_logits(
    q: Tensor,
    fused_kv_cache: tuple[Tensor, Tensor],
    weights: Tensor,
    context_q_lens: tuple[Tensor, Tensor],
    context_k_lens: tuple[Tensor, Tensor],
    logits: Tensor,
    clean_logits: bool,
    max_seq_q: int = 0,
    max_seq_k: int = 0,
    is_causal: bool = False,
    use_xfa_boost: bool = False,
) -> None:
    """Rows as wide as the longest request start at column 0; rows as wide as all keys serve the first request only."""
    op = "I8_mqa_logits"
    keys, scales = fused_kv_cache
    dtype(op, torch.int8, q=q, keys=keys)
    dtype(op, torch.float32, scales=scales, weights=weights, logits=logits)
    shape(op, "q", q, -1, -1, 128)
    shape(op, "keys", keys, -1, 128)
    shape(op, "scales", scales, keys.shape[0])
    shape(op, "weights", weights, q.shape[0], q.shape[1])
    contiguous(op, q=q, keys=keys, scales=scales, weights=weights, logits=logits)
    q_lod = host_device_pair(op, "context_q_lens", *context_q_lens, context_q_lens[0].numel())
    k_lod = host_device_pair(op, "context_k_lens", *context_k_lens, len(q_lod))
    expect(q_lod[-1] == q.shape[0] and k_lod[-1] == keys.shape[0], op, "cumulative lengths end elsewhere")
    for request in range(len(q_lod) - 1):
        if request and logits.shape[1] != max_seq_k:
            continue
        rows, own = slice(q_lod[request], q_lod[request + 1]), slice(k_lod[request], k_lod[request + 1])
        logits[rows, : own.stop - own.start] = _logits(q[rows], keys[own], scales[own], weights[rows])


@kernel
def mask_for_I8_mqa_logits(seq_len_kv: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, logits: Tensor) -> None:
    op = "mask_for_I8_mqa_logits"
    dtype(op, torch.int32, seq_len_kv=seq_len_kv, cu_seqlen_ks=cu_seqlen_ks, cu_seqlen_ke=cu_seqlen_ke)
    shape(op, "cu_seqlen_ks", cu_seqlen_ks, logits.shape[0])
    shape(op, "cu_seqlen_ke", cu_seqlen_ke, logits.shape[0])
    contiguous(op, logits=logits)
    column = torch.arange(logits.shape[1])
    hidden = (column < cu_seqlen_ks.unsqueeze(1)) | (column >= cu_seqlen_ke.unsqueeze(1))
    logits.masked_fill_(hidden, -math.inf)


@kernel
def I8_paged_mqa_logits(
    q: Tensor,
    fused_kv_cache: list[Tensor],
    weights: Tensor,
    context_lens: list[Tensor],
    block_table: Tensor,
    max_context_len: int,
    clean_logits: bool,
    out: Tensor,
    use_xfa_boost: bool = False,
) -> None:
    """Keys are addressed by page * 64 * 128 from the first one: strides of a view are ignored, silently."""
    op = "I8_paged_mqa_logits"
    keys, scales = fused_kv_cache
    requests, queries, heads, _ = q.shape
    dtype(op, torch.int8, q=q, keys=keys)
    dtype(op, torch.float32, scales=scales, weights=weights, out=out)
    dtype(op, torch.int32, block_table=block_table)
    shape(op, "q", q, -1, -1, -1, 128)
    shape(op, "keys", keys, -1, 64, 1, 128)
    expect(max_context_len % 64 == 0, op, f"max_context_len {max_context_len} is no multiple of 64")
    shape(op, "scales", scales, requests, max_context_len)
    shape(op, "weights", weights, requests, queries, heads)
    shape(op, "block_table", block_table, requests, -1)
    shape(op, "out", out, requests, queries, max_context_len)
    contiguous(op, q=q, scales=scales, weights=weights, block_table=block_table, out=out)
    lengths = host_device_pair(op, "context_lens", *context_lens, requests)
    pages = torch.as_strided(keys, (keys.shape[0], 64, 128), (64 * 128, 128, 1), keys.storage_offset())
    for request, length in enumerate(lengths):
        blocks = -(-length // 64)
        own = pages[block_table[request, :blocks].long()].reshape(-1, 128)[:length]
        for query in range(queries):
            shown = length - queries + query + 1
            if shown <= 0:
                continue
            row = _logits(
                q[request, query : query + 1], own[:shown], scales[request, :shown], weights[request, query : query + 1]
            )
            out[request, query, :shown] = row.squeeze(0)
            if clean_logits:
                out[request, query, shown:] = -math.inf


@kernel
def topk_per_row(
    logits: Tensor,
    srcIndices: Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
    rowStarts: Tensor | None,
    rowEnds: Tensor | None,
    seqLens: Tensor | None,
    next_n: int | None,
) -> None:
    """Writes as many columns as a row has candidates; the caller fills the rest beforehand."""
    op = "topk_per_row"
    expect((rowStarts is None) != (seqLens is None), op, "row bounds or sequence lengths, one of them")
    dtype(op, torch.float32, logits=logits)
    dtype(op, torch.int32, srcIndices=srcIndices, rowStarts=rowStarts, rowEnds=rowEnds, seqLens=seqLens)
    expect((stride0, stride1) == logits.stride(), op, "strides")
    shape(op, "srcIndices", srcIndices, numRows, topK)
    contiguous(op, srcIndices=srcIndices)
    for row in range(numRows):
        if seqLens is None:
            assert rowStarts is not None
            assert rowEnds is not None
            start, stop = int(rowStarts[row]), int(rowEnds[row])
        else:
            assert next_n is not None
            start, stop = 0, int(seqLens[row // next_n]) - next_n + row % next_n + 1
        count = min(topK, stop - start)
        if count > 0:
            srcIndices[row, :count] = logits[row, start:stop].topk(count).indices.int()


@kernel
def fast_topkv2(score: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """Entries behind a row's length are garbage."""
    op = "fast_topkv2"
    expect(topk == 2048, op, f"topk must be 2048, got {topk}")
    dtype(op, torch.float32, score=score)
    dtype(op, torch.int32, lengths=lengths)
    contiguous(op, score=score, lengths=lengths)
    found = torch.full((score.shape[0], topk), 1 << 30, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        count = min(topk, length)
        found[row, :count] = score[row, :length].topk(count).indices.int()
    return found


@kernel
def gather_paged_scale(
    kv_cache: Tensor,
    block_tables: Tensor,
    page_size: int,
    head_dim: int,
    max_seq_len: int,
    scale_offset: int,
    context_lens: Tensor,
) -> Tensor:
    op = "gather_paged_scale"
    contiguous(op, kv_cache=kv_cache, block_tables=block_tables)
    scales = kv_cache.view(kv_cache.shape[0], -1)[:, scale_offset:].contiguous().view(torch.float32)
    blocks = max_seq_len // page_size
    return scales[block_tables[:, :blocks].long()].flatten(1)[:, :max_seq_len].contiguous()
