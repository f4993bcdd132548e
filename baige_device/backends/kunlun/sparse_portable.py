"""`sparse_attention` for any head layout in vendor-neutral torch: gather the listed rows, batched product, softmax.

The vendor's sparse kernels know one kv head only, so lists per kv head (GQA, LU-KV's ragged heads) run here. Reads
each listed row once and writes it once to a workspace, which is what a gather-based kernel costs on any chip.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baige_device.backends.kunlun import rows
from baige_device.errors import ContractError

__all__ = ["sparse_attention"]

_WORKSPACE_BYTES = 1 << 28
"""Bound of the gathered fp32 keys of one tile of queries."""


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
    """See the contract; no `fp8_ds_mla`. Fixed shapes, no sync."""
    if kv_format != "plain":
        raise ContractError("sparse_attention", "kv_format", "plain (Kunlun has no float8)", repr(kv_format))
    width = v_dim if v_rows is None else v_rows.shape[-1]
    out = q.new_empty(q.shape[0], q.shape[1], width) if out is None else out
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32) if lse is None else lse
    sets = [(k_rows, v_rows, indices)]
    if extra_k is not None and extra_indices is not None:
        sets.append((extra_k, extra_v, extra_indices))
    row_floats = sum(lists.shape[1] * lists.shape[2] for _, _, lists in sets) * (q.shape[2] + width)
    tile = max(1, _WORKSPACE_BYTES // max(1, 4 * row_floats))
    for low in range(0, q.shape[0], tile):
        part = slice(low, low + tile)
        gathered = [_gather(k, v, lists[part], width) for k, v, lists in sets]
        keys, values, live = (torch.cat(pieces, 2) for pieces in zip(*gathered, strict=True))
        _attend(q[part], keys, values, live, scale, out[part], lse[part])
    return out, lse


def _gather(k: Tensor, v: Tensor | None, lists: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 keys `[t, G, K, D]`, values `[t, G, K, Dv]` and bool `[t, G, K]`; masked rows are zeros."""
    live = lists >= 0
    if k.numel() == 0:
        return (
            torch.zeros(*lists.shape, k.shape[-1], device=k.device),
            torch.zeros(*lists.shape, width, device=k.device),
            torch.zeros_like(live),
        )
    keys = _heads(k, lists, live)
    return keys, keys[..., :width] if v is None else _heads(v, lists, live), live


def _heads(pool: Tensor, lists: Tensor, live: Tensor) -> Tensor:
    pages = rows.paged(pool, 2)
    wide = lists.clamp(min=0).to(torch.int64)
    head = torch.arange(pages.shape[2], device=pool.device).view(1, -1, 1)
    found = pages[wide // pages.shape[1], wide % pages.shape[1], head]
    return torch.where(live.unsqueeze(-1), found, 0.0).float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, live: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    grouped = q.float().unflatten(1, (keys.shape[1], -1)) * scale
    logits = (grouped @ keys.transpose(2, 3)).masked_fill(~live.unsqueeze(2), -math.inf)
    if logits.shape[3] == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    total = torch.logsumexp(logits, 3)
    shift = torch.where(total == -math.inf, 0.0, total)
    out.copy_((torch.exp(logits - shift.unsqueeze(3)) @ values).flatten(1, 2))
    lse.copy_(total.flatten(1, 2))
