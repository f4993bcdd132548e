"""Contract of `attend_paged`, and the paged-cache checks that the attention ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import (
    INDEX_DTYPES,
    Cost,
    OpContract,
    check_dtype,
    check_finite,
    check_inner_contiguous,
    check_not_empty,
    check_not_input,
    check_number,
    check_same_device,
    check_shape,
    check_writable,
)

__all__ = ["CONTRACT", "FLOATS", "attend_paged", "check_batch", "check_batch_values", "check_bounds", "check_out"]

_OP = "attend_paged"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def attend_paged(  # type: ignore[empty-body]
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    causal: bool = True,
    window: int = 0,
    logits_soft_cap: float = 0.0,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention of a ragged batch of queries over a paged KV cache (prefill, chunked prefill and decode alike).

    Request b owns queries `q_starts[b]:q_starts[b+1]`, the last ones of its `seq_lens[b]` tokens: query i stands at
    position `seq_lens[b] - (number of its queries) + i`. The cache already holds the new tokens (`kv_write` first).

    Args:
        q: `[T, H, D]` bf16, fp16 or fp32. T may exceed `q_starts[B]`: the rows behind are graph padding.
        k_cache: `[P, N, G, D]` bf16, fp16 or fp32, page P, offset N, kv head G; any outer strides, D dense. H % G == 0.
        v_cache: `[P, N, G, Dv]`, or None for MLA, where values are the first `v_dim` columns of `k_cache`.
        block_table: int32 or int64 `[B, M]`: page of each block of N tokens; entries past the length are never read.
            With N = 1 it is a token table.
        q_starts: int32 or int64 `[B+1]`, ascending from 0. seq_lens: int32 or int64 `[B]`; 0 marks a padded request.
        scale: factor on q·k. v_dim: width of the values when `v_cache` is None.
        causal: a query sees positions up to its own. window: > 0 hides every position <= its own - window, so that a
            causal query sees its last `window` positions.
        logits_soft_cap: c > 0 replaces logits x by c·tanh(x/c).
        max_query_tokens, max_seq_tokens: upper bounds of the lengths, known to the host; 0 means unknown.
        out: `[T, H, Dv]`, lse: fp32 `[T, H]` buffers; None allocates. Every element is written.
    Returns:
        out `[T, H, Dv]` of q's dtype and lse (natural log) fp32 `[T, H]`. Padded and empty rows give 0 and -inf.
    Raises:
        ContractError: shapes, dtypes, devices, `out` in the memory of q; with checked values, lengths that exceed the
            table or their bounds, or more queries than tokens.
    Cost: reads K and V of every request once, 2·H·(D+Dv) FLOPs per query and visible token.
    """


def check_batch(op: str, q: Tensor, block_table: Tensor, q_starts: Tensor, seq_lens: Tensor) -> None:
    """Checks of the ragged-batch arguments."""
    for name, tensor in (("block_table", block_table), ("q_starts", q_starts), ("seq_lens", seq_lens)):
        check_dtype(op, name, tensor, INDEX_DTYPES)
    check_shape(op, "block_table", block_table, ("B", "M"))
    check_shape(op, "q_starts", q_starts, (block_table.shape[0] + 1,))
    check_shape(op, "seq_lens", seq_lens, (block_table.shape[0],))
    check_same_device(op, q=q, block_table=block_table, q_starts=q_starts, seq_lens=seq_lens)


def check_batch_values(
    op: str, q: Tensor, cache: Tensor, block_table: Tensor, q_starts: Tensor, seq_lens: Tensor
) -> None:
    """Checks of the ragged-batch values; reads the tensors."""
    starts, lens = q_starts.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > q.shape[0]:
        raise ContractError(op, "q_starts", f"ascending from 0 to at most T = {q.shape[0]}", str(starts))
    pages, page_tokens = cache.shape[:2]
    for row, length in enumerate(lens):
        blocks = -(-length // page_tokens)
        if length < 0 or blocks > block_table.shape[1]:
            most = block_table.shape[1] * page_tokens
            raise ContractError(op, f"seq_lens[{row}]", f"0 to {most} tokens", str(length))
        if length and starts[row + 1] - starts[row] > length:
            queries = starts[row + 1] - starts[row]
            raise ContractError(op, f"seq_lens[{row}]", f">= its {queries} queries", str(length))
        used = block_table[row, :blocks]
        if bool(((used < 0) | (used >= pages)).any()):
            raise ContractError(op, f"block_table[{row}]", f"pages in [0, {pages})", str(used.tolist()))


def check_bounds(op: str, values: bool, q_starts: Tensor, seq_lens: Tensor, queries: int, tokens: int) -> None:
    """Checks of `max_query_tokens` and `max_seq_tokens`; with `values`, against the lengths that they bound."""
    for name, bound, of in (("max_query_tokens", queries, q_starts.diff()), ("max_seq_tokens", tokens, seq_lens)):
        check_number(op, name, bound, 0)
        longest = int(of.max()) if values and bound and of.numel() else 0
        if longest > bound:
            raise ContractError(op, name, f"0 or >= {longest}, the longest", str(bound))


def check_out(op: str, q: Tensor, v_dim: int, out: Tensor | None, lse: Tensor | None) -> None:
    """Checks of the optional output buffers."""
    if out is not None:
        check_dtype(op, "out", out, (q.dtype,))
        check_shape(op, "out", out, (q.shape[0], q.shape[1], v_dim))
        check_inner_contiguous(op, "out", out)
        check_writable(op, "out", out)
    if lse is not None:
        check_dtype(op, "lse", lse, (torch.float32,))
        check_shape(op, "lse", lse, (q.shape[0], q.shape[1]))
        check_writable(op, "lse", lse)
    check_same_device(op, q=q, out=out, lse=lse)


def check(
    values: bool,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    causal: bool = True,
    window: int = 0,
    logits_soft_cap: float = 0.0,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    check_dtype(_OP, "q", q, FLOATS)
    check_shape(_OP, "q", q, ("T", "H", "D"))
    check_dtype(_OP, "k_cache", k_cache, FLOATS)
    check_shape(_OP, "k_cache", k_cache, ("P", "N", "G", q.shape[2]))
    check_inner_contiguous(_OP, "k_cache", k_cache)
    check_not_empty(_OP, "q", q, 1, 2)
    check_not_empty(_OP, "k_cache", k_cache, 1)
    groups = k_cache.shape[2]
    if groups == 0 or q.shape[1] % groups:
        raise ContractError(_OP, "q.shape[1]", f"a multiple of the {groups} kv heads", str(q.shape[1]))
    if v_cache is None:
        if not 0 < v_dim <= q.shape[2]:
            raise ContractError(_OP, "v_dim", f"1 to D = {q.shape[2]} when v_cache is None", str(v_dim))
    else:
        check_shape(_OP, "v_cache", v_cache, (*k_cache.shape[:3], "Dv"))
        check_dtype(_OP, "v_cache", v_cache, (k_cache.dtype,))
        check_inner_contiguous(_OP, "v_cache", v_cache)
    check_batch(_OP, q, block_table, q_starts, seq_lens)
    check_same_device(_OP, q=q, k_cache=k_cache, v_cache=v_cache)
    check_number(_OP, "window", window, 0)
    check_finite(_OP, "logits_soft_cap", logits_soft_cap, 0)
    check_finite(_OP, "scale", scale)
    check_out(_OP, q, v_dim if v_cache is None else v_cache.shape[3], out, lse)
    check_not_input(_OP, "out", out, q=q)
    check_bounds(_OP, values, q_starts, seq_lens, max_query_tokens, max_seq_tokens)
    if values:
        check_batch_values(_OP, q, k_cache, block_table, q_starts, seq_lens)


def cost(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    causal: bool = True,
    window: int = 0,
    logits_soft_cap: float = 0.0,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Cost:
    """Bytes of cache read and FLOPs; reads the lengths, so it is for planning and benchmarks."""
    width = v_dim if v_cache is None else v_cache.shape[3]
    row = k_cache.shape[2] * (k_cache.shape[3] + (0 if v_cache is None else width)) * k_cache.element_size()
    pairs = 0
    for length, queries in zip(seq_lens.tolist(), q_starts.diff().tolist(), strict=True):
        for position in range(length - queries, length):
            first = max(0, position - window + 1) if window else 0
            pairs += (position + 1 if causal else length) - first
    return Cost(int(seq_lens.sum()) * row, 2 * q.shape[1] * (q.shape[2] + width) * pairs)


CONTRACT = OpContract(
    _OP,
    "attention",
    attend_paged,
    check,
    cost,
    "attend_paged(Tensor q, Tensor k_cache, Tensor? v_cache, Tensor block_table, Tensor q_starts, Tensor seq_lens, *, "
    "float scale, int v_dim=0, bool causal=True, int window=0, float logits_soft_cap=0.0, int max_query_tokens=0, "
    "int max_seq_tokens=0) -> (Tensor out, Tensor lse)",
)
