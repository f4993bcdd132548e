"""Reference of `sparse_attention`: gathers each query's rows, fp32 inside, a block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.attend_paged.reference import softmax_average
from baige_device.ops.sparse_attention.contract import FP8_DS_MLA_BYTES, kv_rows

__all__ = ["decode_fp8_ds_mla", "sparse_attention"]

_TILE_ELEMENTS = 1 << 22
"""Gathered key elements that one block of queries holds (16 MiB in fp32)."""


def sparse_attention(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor | None,
    indices: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    kv_format: str = "plain",
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_indices: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    reserved_sms: int = 0,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    tokens, heads, dim = q.shape
    width = v_dim if v_rows is None else v_rows.shape[-1]
    out = q.new_empty(tokens, heads, width) if out is None else out
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if lse is None else lse
    sets = [(k_rows, v_rows, indices)]
    if extra_k is not None and extra_indices is not None:
        sets.append((extra_k, extra_v, extra_indices))
    listed = sum(lists[0].numel() for _, _, lists in sets) if tokens else 0
    tile = max(1, _TILE_ELEMENTS // max(1, listed * dim))
    for lo in range(0, tokens, tile):
        block = slice(lo, min(lo + tile, tokens))
        parts = [_read_set(k, v, lists[block], kv_format, width) for k, v, lists in sets]
        k, v, valid = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in zip(*parts, strict=True))
        grouped = q[block].float().reshape(k.shape[0], k.shape[1], -1, dim) * scale
        logits = (grouped @ k.transpose(2, 3)).masked_fill(~valid.unsqueeze(2), -torch.inf)
        average, total = softmax_average(logits, v)
        out[block] = average.flatten(1, 2)
        lse[block] = total.flatten(1, 2)
    return out, lse


def decode_fp8_ds_mla(rows: Tensor) -> Tensor:
    """Decode uint8 rows `[..., 656]` of the fp8 latent cache to fp32 `[..., 576]` (512 latent columns, 64 of rope)."""
    latent = rows[..., :512].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn).float()
    scales = rows[..., 512:528].clone(memory_format=torch.contiguous_format).view(torch.float32)
    rope = rows[..., 528:FP8_DS_MLA_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return torch.cat([latent * scales.repeat_interleave(128, -1), rope.float()], -1)


def _read_set(
    k_pool: Tensor, v_pool: Tensor | None, lists: Tensor, kv_format: str, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys `[t, G, K, D]` and values `[t, G, K, Dv]`, zeros where masked, and validity `[t, G, K]` of the rows."""
    valid = lists >= 0
    k = _take(k_pool, lists)
    k = decode_fp8_ds_mla(k) if kv_format == "fp8_ds_mla" else k.float()
    # 0 * NaN is NaN: a masked row must be replaced, a zero probability is not enough.
    k.masked_fill_(~valid.unsqueeze(-1), 0.0)
    if v_pool is None:
        return k, k[..., :width], valid
    return k, _take(v_pool, lists).float().masked_fill_(~valid.unsqueeze(-1), 0.0), valid


def _take(pool: Tensor, lists: Tensor) -> Tensor:
    """A copy of the rows `[t, G, K, D]`; masked entries hold some row of the pool."""
    if kv_rows(pool) == 0:
        return pool.new_zeros(*lists.shape, pool.shape[-1])
    rows = lists.long().clamp_min(0)
    heads = torch.arange(lists.shape[1], device=pool.device).view(1, -1, 1)
    if pool.dim() == 3:
        return pool[rows, heads]
    page_tokens = pool.shape[1]
    return pool[rows // page_tokens, rows % page_tokens, heads]
