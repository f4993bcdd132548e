"""Attention of one query head over an explicit list of keys, in float64 and plain loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "attend", "attend_batch", "expected_paged"]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, cap: float = 0.0) -> tuple[Tensor, float]:
    """Output `[Dv]` and log-sum-exp of a query `[D]`; 0 and -inf without keys."""
    if not keys:
        return torch.tensor(0.0, dtype=torch.float64), -math.inf
    logits = [float(q.double() @ key.double()) * scale for key in keys]
    if cap:
        logits = [cap * math.tanh(logit / cap) for logit in logits]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    average = torch.stack([w * value.double() for w, value in zip(weights, values, strict=True)]).sum(0) / total
    return average, top + math.log(total)


def attend_batch(queries: Tensor, visible: list[list[tuple[Tensor, Tensor]]], scale: float, v_dim: int, cap: float = 0):
    """`attend` for queries `[T, H, D]`; `visible[t * H + h]` lists the (key, value) pairs of one head."""
    tokens, heads, _ = queries.shape
    out = torch.zeros(tokens, heads, v_dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            pairs = visible[t * heads + h]
            out[t, h], lse[t, h] = attend(queries[t, h], [k for k, _ in pairs], [v for _, v in pairs], scale, cap)
    return out, lse


def expected_paged(
    q, k_cache, v_cache, block_table, q_starts, seq_lens, *, scale, v_dim=0, causal=True, window=0, cap=0
):
    """What `attend_paged` must return, token by token."""
    tokens, heads, _ = q.shape
    page_tokens, groups = k_cache.shape[1:3]
    visible: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(tokens * heads)]
    for b, length in enumerate(seq_lens.tolist()):
        first, last = int(q_starts[b]), int(q_starts[b + 1])
        for t in range(first, last if length else first):
            own = length - (last - first) + (t - first)
            seen = [s for s in range(length) if (s <= own or not causal) and (s > own - window or not window)]
            for h in range(heads):
                for s in seen:
                    at = int(block_table[b, s // page_tokens]), s % page_tokens, h // (heads // groups)
                    key = k_cache[at]
                    visible[t * heads + h].append((key, key[:v_dim] if v_cache is None else v_cache[at]))
    return attend_batch(q, visible, scale, v_dim if v_cache is None else v_cache.shape[3], cap)
