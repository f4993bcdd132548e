"""`sparse_attention` through FlashMLA's sparse kernels (`flash_mla_library` finds them).

FlashMLA takes 64 or 128 heads of bf16, fp8 lists in multiples of 64 and bf16 lists in multiples of 128. A call outside
its shapes (a pool that is not in pages of 64 rows, a list of another length, a second bf16 pool) goes to the Triton
kernel: the choice depends on shapes alone, so it is the same in every step and inside a captured graph.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor

from baige_device.backends.cuda.flash_mla_library import FlashMla, find_flash_mla
from baige_device.backends.cuda.flash_mla_plan import BLOCK_ROWS, leave_parts_free
from baige_device.backends.portable.merge_attention import merge_attention
from baige_device.backends.portable.sparse_attention import sparse_attention as portable
from baige_device.errors import BackendError

__all__ = ["sparse_attention"]

_HEADS = (64, 128)
_PAGE_ROWS = 64
_DECODE_STEP, _PREFILL_STEP = 64, 128
_Shape: TypeAlias = tuple[int, int, int, torch.device]
"""Queries, heads, entries of a list, device."""
_CACHED_TOKENS = 1024
"""Most queries of a call whose schedule is kept: decode batches. Prefills of ever new lengths would pile up."""


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
    """See `baige_device/ops/sparse_attention/contract.py`. `reserved_sms` is followed for 656-byte rows.

    The first call of a shape waits for the device, and once more for each `reserved_sms`; no later one does.
    """
    latent = v_rows is None and v_dim == 512 and q.dtype == torch.bfloat16 and q.shape[2] == 576
    mla = latent and q.shape[0] > 0 and q.shape[1] in _HEADS and indices.shape[1] == 1
    if mla and kv_format == "fp8_ds_mla":
        pages = _pages(k_rows, indices)
        if pages is not None and (extra_k is None or extra_indices is None):
            return _decode(q, pages, indices, scale, out, lse, reserved_sms)
        extra_pages = None if extra_k is None or extra_indices is None else _pages(extra_k, extra_indices)
        if pages is not None and extra_pages is not None and extra_indices is not None:
            # Its kernels for 656-byte rows take one pool a call.
            first = _decode(q, pages, indices, scale, None, None, reserved_sms)
            second = _decode(q, extra_pages, extra_indices, scale, None, None, reserved_sms)
            return merge_attention(*first, *second, out=out, lse=lse)
    elif mla and extra_k is None and _is_dense_bf16(k_rows, indices):
        return _prefill(q, k_rows.view(-1, 1, 576), indices, scale, out, lse)
    return portable(
        q,
        k_rows,
        v_rows,
        indices,
        scale=scale,
        v_dim=v_dim,
        kv_format=kv_format,
        extra_k=extra_k,
        extra_v=extra_v,
        extra_indices=extra_indices,
        out=out,
        lse=lse,
    )


def _pages(pool: Tensor, lists: Tensor) -> Tensor | None:
    """The pool as `[P, 64, 1, 656]`, or None when rows do not lie in whole pages of 64, or lists not in steps of 64."""
    if pool.shape[0] == 0 or lists.shape[2] == 0 or lists.shape[2] % _DECODE_STEP:
        return None
    if pool.dim() == 3:
        if pool.shape[0] % _PAGE_ROWS or not pool.is_contiguous() or pool.data_ptr() % 16:
            return None
        return pool.view(-1, _PAGE_ROWS, 1, pool.shape[2])
    aligned = pool.data_ptr() % 16 == 0 and pool.stride(0) % 16 == 0
    dense = pool.shape[2] == 1 and pool.stride(3) == 1 and pool.stride(1) == pool.shape[3]
    return pool if pool.shape[1] == _PAGE_ROWS and dense and aligned else None


def _is_dense_bf16(pool: Tensor, lists: Tensor) -> bool:
    """Whether the prefill kernel can read the pool: bf16, no gaps, lists in steps of 128."""
    steps = pool.shape[0] > 0 and lists.shape[2] > 0 and lists.shape[2] % _PREFILL_STEP == 0
    return steps and pool.dtype == torch.bfloat16 and pool.is_contiguous()


@functools.lru_cache(maxsize=1)
def _library() -> FlashMla:
    found = find_flash_mla()
    if found is None:
        raise BackendError("cuda: FlashMLA was offered and is gone")
    return found


@functools.cache
def _schedules() -> dict[_Shape, Any]:
    return {}


@functools.cache
def _reserving() -> dict[tuple[_Shape, int], Any]:
    return {}


def _schedule(shape: _Shape) -> Any:
    """FlashMLA's split plan: it depends on shapes alone. Plans made during a capture live in the graph's memory."""
    found = _schedules().get(shape)
    if found is None:
        found = _library().schedule()
        if shape[0] <= _CACHED_TOKENS and not torch.cuda.is_current_stream_capturing():
            _schedules()[shape] = found
    return found


def _with_room(shape: _Shape, schedule: Any, sms: int) -> Any:
    """The plan that leaves a part free for each of `sms` multiprocessors, each of which may belong to another part.

    It is `schedule` itself where that cannot be: a shape that no call outside a capture has met, or a plan of another
    layout.
    """
    if sms == 0 or shape not in _schedules():
        return schedule
    key = (shape, sms)
    if key not in _reserving():
        if torch.cuda.is_current_stream_capturing():
            return schedule
        plan, splits = schedule.tile_scheduler_metadata, schedule.num_splits
        made = leave_parts_free(plan, splits, shape[0], shape[2] // BLOCK_ROWS, sms)
        _reserving()[key] = schedule
        if made is not None:
            roomy = copy.copy(schedule)
            roomy.tile_scheduler_metadata, roomy.num_splits = made
            torch.cuda.current_stream(shape[3]).synchronize()  # another stream may use the plan next
            _reserving()[key] = roomy
    return _reserving()[key]


def _decode(
    q: Tensor,
    pages: Tensor,
    indices: Tensor,
    scale: float,
    out: Tensor | None,
    lse: Tensor | None,
    reserved_sms: int,
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], indices.shape[2], q.device)
    schedule = _schedule(shape)
    first_use = schedule.tile_scheduler_metadata is None
    chosen = schedule if first_use else _with_room(shape, schedule, reserved_sms)
    ids = (indices if indices.dtype == torch.int32 else indices.to(torch.int32)).contiguous()
    result, total = _library().decode(q.contiguous().unsqueeze(1), pages, ids, scale, chosen)
    if first_use and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(q.device).synchronize()  # another stream may use the plan next
        _with_room(shape, schedule, reserved_sms)  # now, since the next call may be captured
    return _deliver(result.squeeze(1), total.squeeze(2), out, lse)


def _prefill(
    q: Tensor, rows: Tensor, indices: Tensor, scale: float, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    ids = indices.to(torch.int32).contiguous()
    result, total = _library().prefill(q.contiguous(), rows, ids, scale, out)
    return _deliver(result, total, out, lse)


def _deliver(result: Tensor, total: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Into the caller's buffers; FlashMLA marks a query without rows by +inf, the contract by -inf."""
    lse = total if lse is None else lse
    torch.nan_to_num(total, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf, out=lse)
    if out is None or result.data_ptr() == out.data_ptr():
        return result, lse
    return out.copy_(result), lse
