"""`index_topk`: a Triton kernel for the scores, torch's radix select for the K best."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.portable.index_topk_kernels import index_scores_kernel
from baige_device.backends.portable.runtime import INTERPRET, dot_dtype, launching_on, power_of_2

__all__ = ["index_topk", "score_keys"]

_SCORE_BYTES = 512 << 20
"""Most memory for scores at a time; longer prefills go through in chunks of queries."""


def index_topk(
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
    """See `baige_device/ops/index_topk/contract.py`. Without host reads."""
    tokens = q.shape[0]
    out = torch.empty((tokens, topk), dtype=torch.int32, device=q.device) if out is None else out
    columns = min(max_seq_tokens or block_table.shape[1] * k_cache.shape[1], block_table.shape[1] * k_cache.shape[1])
    if tokens == 0 or columns == 0 or seq_lens.shape[0] == 0:
        out.fill_(-1)
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    kept = min(topk, columns)
    chunk = max(1, min(tokens, _SCORE_BYTES // (4 * columns)))
    scores = torch.empty((chunk, columns), dtype=torch.float32, device=q.device)
    with launching_on(q):
        for first in range(0, tokens, chunk):
            rows = min(chunk, tokens - first)
            score_keys(q, weights, k_cache, k_scales, block_table, q_starts, seq_lens, scores[:rows], first)
            best, positions = scores[:rows].topk(kept, dim=1, sorted=False)
            out[first : first + rows, :kept] = positions.masked_fill_(best == -torch.inf, -1)
    out[:, kept:] = -1
    return out


def score_keys(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    k_scales: Tensor | None,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    scores: Tensor,
    first_token: int,
) -> None:
    """Fill `scores [t, S]` for the queries from `first_token` on."""
    heads, dim = q.shape[1:]
    scales = weights if k_scales is None else k_scales
    block, steps = (16, 2) if INTERPRET else (128, 4)
    index_scores_kernel[(scores.shape[0], -(-scores.shape[1] // (block * steps)))](
        q,
        weights,
        k_cache,
        scales,
        block_table,
        q_starts,
        seq_lens,
        scores,
        *q.stride()[:2],
        *weights.stride(),
        *k_cache.stride()[:2],
        *scales.stride(),
        *block_table.stride(),
        q_starts.stride(0),
        seq_lens.stride(0),
        scores.stride(0),
        first_token,
        seq_lens.shape[0],
        k_cache.shape[1],
        scores.shape[1],
        HEADS=heads,
        HEADS_BLOCK=power_of_2(heads),
        D=dim,
        D_BLOCK=power_of_2(dim, 32),
        BLOCK_N=block,
        STEPS=steps,
        SCALED=k_scales is not None,
        DOT=_dot(q),
        num_warps=4,
        num_stages=3,
    )


def _dot(q: Tensor) -> object:
    """fp8 stays fp8 for the matrix units; see `dot_dtype` for the rest."""
    if q.dtype == torch.float8_e4m3fn and not INTERPRET:
        import triton.language as tl

        return tl.float8e4nv
    return dot_dtype(q)
