"""Softmax attention, written from its definition in float64, on the CPU."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from baige_device.testing.checks import check_close, check_pair, expect
from baige_device.testing.oracle_fp8 import decode_e4m3

__all__ = ["attend", "check_attention", "decode_fp8_ds_mla", "draw_scale", "paged_oracle", "sparse_oracle"]


def draw_scale(constants: random.Random, head_size: int, *, small: bool = False) -> float:
    """A factor on q·k that is far from D**-0.5, which a kernel may have built in; with `small` below it.

    Models have others: DeepSeek 192**-0.5 for rows of 576, times a factor for long contexts.
    """
    low, high = constants.uniform(0.6, 0.8), constants.uniform(1.3, 1.75)
    return (low if small else constants.choice((low, high))) / math.sqrt(head_size)


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """One head: q `[T, D]`, k `[L, D]`, v `[L, Dv]`, visible bool `[T, L]` -> out `[T, Dv]`, lse `[T]` (natural log).

    Rows without a visible key give 0 and -inf; keys and values that no row sees may hold anything.
    """
    seen = visible.any(0).unsqueeze(1)
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    logits = q @ k.t() * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    return weights @ v, lse


def paged_oracle(args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """`attend_paged` in float64, from its (CPU) arguments."""
    q, k_cache, v_cache, scale = args["q"].double(), args["k_cache"], args["v_cache"], args["scale"]
    causal, window = args.get("causal", True), args.get("window", 0)
    width = args.get("v_dim", 0) if v_cache is None else v_cache.shape[3]
    heads, groups, page = q.shape[1], k_cache.shape[2], k_cache.shape[1]
    out = torch.zeros(q.shape[0], heads, width, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    starts = args["q_starts"].tolist()
    for row, length in enumerate(args["seq_lens"].tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or length == 0:
            continue
        places = [(int(args["block_table"][row, token // page]), token % page) for token in range(length)]
        pages, offsets = (torch.tensor(column) for column in zip(*places, strict=True))
        keys = k_cache[pages, offsets].double()
        values = keys[..., :width] if v_cache is None else v_cache[pages, offsets].double()
        visible = _visible(end - begin, length, causal, window)
        for head in range(heads):
            group = head // (heads // groups)
            out[begin:end, head], lse[begin:end, head] = attend(
                q[begin:end, head], keys[:, group], values[:, group], visible, scale, args.get("logits_soft_cap", 0.0)
            )
    return out, lse


def _visible(queries: int, length: int, causal: bool, window: int) -> Tensor:
    position = torch.arange(length - queries, length).unsqueeze(1)
    key = torch.arange(length).unsqueeze(0)
    visible = (key <= position) if causal else torch.ones(queries, length, dtype=torch.bool)
    return visible & (key > position - window) if window else visible


def decode_fp8_ds_mla(rows: Tensor) -> Tensor:
    """uint8 `[..., 656]` -> float64 `[..., 576]`: 512 e4m3 x fp32 scale per 128 columns, then 64 bf16."""
    rows = rows.cpu().contiguous()
    scales = rows[..., 512:528].contiguous().view(torch.float32).double()
    latent = decode_e4m3(rows[..., :512]) * scales.repeat_interleave(128, -1)
    rope = rows[..., 528:656].contiguous().view(torch.bfloat16).double()
    return torch.cat([latent, rope], -1)


def sparse_oracle(args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """`sparse_attention` in float64, from its (CPU) arguments."""
    q = args["q"].double()
    sets = [(args["k_rows"], args["v_rows"], args["indices"])]
    if args.get("extra_k") is not None:
        sets.append((args["extra_k"], args.get("extra_v"), args["extra_indices"]))
    heads, groups = q.shape[1], args["indices"].shape[1]
    width = args.get("v_dim", 0) if args["v_rows"] is None else args["v_rows"].shape[-1]
    out = torch.zeros(q.shape[0], heads, width, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for token in range(q.shape[0]):
        for group in range(groups):
            picked = [_pick(k, v, indices[token, group], group, width, args) for k, v, indices in sets]
            keys = torch.cat([key for key, _ in picked])
            values = torch.cat([value for _, value in picked])
            mine = slice(group * (heads // groups), (group + 1) * (heads // groups))
            visible = torch.ones(heads // groups, keys.shape[0], dtype=torch.bool)
            out[token, mine], lse[token, mine] = attend(q[token, mine], keys, values, visible, args["scale"])
    return out, lse


def _pick(
    k: Tensor, v: Tensor | None, indices: Tensor, group: int, width: int, args: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    ids = indices[indices >= 0].long()
    keys = _rows(k, ids, group)
    keys = decode_fp8_ds_mla(keys) if args.get("kv_format", "plain") == "fp8_ds_mla" else keys.double()
    return keys, keys[:, :width] if v is None else _rows(v, ids, group).double()


def _rows(pool: Tensor, ids: Tensor, group: int) -> Tensor:
    if pool.dim() == 3:
        return pool[ids, group]
    return pool[ids // pool.shape[1], ids % pool.shape[1], group]


def check_attention(
    args: Mapping[str, Any], result: Any, want: tuple[Tensor, Tensor], dtype: torch.dtype, limits: tuple[float, float]
) -> float:
    """Check (out, lse): the given buffers are used, dtypes, no poison, values, and exact 0 / -inf on empty rows."""
    check_pair(result, "out, lse")
    out, lse = result
    for name, got in (("out", out), ("lse", lse)):
        given = args.get(name)
        if given is not None:
            expect(got.data_ptr() == given.data_ptr(), f"{name}: expected the buffer given as {name}")
        else:
            expect(got.is_contiguous(), f"{name}: expected contiguous")
    expect(out.dtype == dtype, f"out.dtype: expected {dtype}, got {out.dtype}")
    expect(lse.dtype == torch.float32, f"lse.dtype: expected float32, got {lse.dtype}")
    worst_lse = check_close("lse", lse, want[1], limits[1])
    worst_out = check_close("out", out, want[0], limits[0])
    empty = want[1].isinf()
    expect(not bool(out.cpu()[empty].any()), "out: expected exact zeros in rows that see no key")
    return max(worst_lse, worst_out)
