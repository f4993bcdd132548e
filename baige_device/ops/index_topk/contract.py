"""Contract of `index_topk`."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.attend_paged.contract import FLOATS, check_batch, check_batch_values, check_bounds
from baige_device.ops.base import (
    Cost,
    OpContract,
    check_dtype,
    check_inner_contiguous,
    check_not_empty,
    check_number,
    check_same_device,
    check_shape,
    check_writable,
)

__all__ = ["CONTRACT", "index_topk"]

_OP = "index_topk"
_SCALED = (torch.float8_e4m3fn, torch.int8)


def index_topk(  # type: ignore[empty-body]
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    k_scales: Tensor | None = None,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Score every visible key of each query with the lightning indexer and return the `topk` best positions.

    score(t, s) = sum over h of weights[t, h] · ReLU(q[t, h] · k[s]), causal. Softmax scale and head gates are folded
    into `weights` by the caller (ReLU is positively homogeneous). Source: DeepSeek-V3.2 technical report, DSA.

    Args:
        q: `[T, Hi, Di]` bf16, fp16, fp32, or float8_e4m3fn or int8 whose per-row scales are folded into `weights`.
        weights: fp32 `[T, Hi]`.
        k_cache: index keys `[P, N, Di]`, q's dtype (fp8 and int8 with `k_scales`); outer strides free.
        block_table, q_starts, seq_lens: the ragged batch, as in `attend_paged`.
        topk: K >= 1. k_scales: fp32 `[P, N]`, factor of each key; None means 1.
        max_query_tokens, max_seq_tokens: upper bounds known to the host; 0 means unknown.
        out: int32 `[T, K]` buffer; None allocates. Every element is written.
    Returns:
        int32 `[T, K]`: positions within the request (0 to seq_len - 1), each at most once, in no particular order. When
        fewer than K keys are visible the other entries, anywhere in the row, are -1, and so are padded rows. Which of
        equal scores are taken is open.
    Raises:
        ContractError: shapes or dtypes; with checked values, lengths that exceed the table.
    Cost: reads each request's keys once; 2·Hi·Di FLOPs per query and visible key.
    """


def check(
    values: bool,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    k_scales: Tensor | None = None,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
) -> None:
    check_dtype(_OP, "q", q, (*FLOATS, *_SCALED))
    check_shape(_OP, "q", q, ("T", "Hi", "Di"))
    check_dtype(_OP, "weights", weights, (torch.float32,))
    check_shape(_OP, "weights", weights, tuple(q.shape[:2]))
    check_dtype(_OP, "k_cache", k_cache, (q.dtype,))
    check_shape(_OP, "k_cache", k_cache, ("P", "N", q.shape[2]))
    check_inner_contiguous(_OP, "k_cache", k_cache)
    check_not_empty(_OP, "q", q, 1, 2)
    check_not_empty(_OP, "k_cache", k_cache, 1)
    check_batch(_OP, q, block_table, q_starts, seq_lens)
    check_same_device(_OP, q=q, weights=weights, k_cache=k_cache, k_scales=k_scales, out=out)
    check_number(_OP, "topk", topk, 1)
    if k_scales is not None:
        check_dtype(_OP, "k_scales", k_scales, (torch.float32,))
        check_shape(_OP, "k_scales", k_scales, tuple(k_cache.shape[:2]))
    elif q.dtype in _SCALED:
        raise ContractError(_OP, "k_scales", "fp32 [P, N] with float8 or int8 keys", "None")
    if out is not None:
        check_dtype(_OP, "out", out, (torch.int32,))
        check_shape(_OP, "out", out, (q.shape[0], topk))
        check_writable(_OP, "out", out)
    check_bounds(_OP, values, q_starts, seq_lens, max_query_tokens, max_seq_tokens)
    if values:
        check_batch_values(_OP, q, k_cache, block_table, q_starts, seq_lens)


def cost(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    k_scales: Tensor | None = None,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
) -> Cost:
    """Bytes of keys read and FLOPs; reads the lengths, so it is for planning and benchmarks."""
    pairs = 0
    for length, queries in zip(seq_lens.tolist(), q_starts.diff().tolist(), strict=True):
        pairs += queries * length - queries * (queries - 1) // 2
    row = k_cache.shape[2] * k_cache.element_size() + (4 if k_scales is not None else 0)
    return Cost(int(seq_lens.sum()) * row, 2 * q.shape[1] * q.shape[2] * pairs)


CONTRACT = OpContract(
    _OP,
    "attention",
    index_topk,
    check,
    cost,
    "index_topk(Tensor q, Tensor weights, Tensor k_cache, Tensor block_table, Tensor q_starts, Tensor seq_lens, *, "
    "int topk, Tensor? k_scales=None, int max_query_tokens=0, int max_seq_tokens=0) -> Tensor",
)
