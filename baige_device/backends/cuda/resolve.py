"""`hot_cache_resolve` on CUDA: one kernel, one block per cache state."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baige_device.backends.cuda.driver import Kernel, context, kernel, max_shared_bytes
from baige_device.errors import ContractError
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan, empty_plan

__all__ = ["hot_cache_resolve"]

_THREADS = 1024
_STATIC_SHARED_BYTES = 15 * 1024
_STREAM_FROM_ROWS = 64
"""Rows from which tables and plans leave the L2 cache first, for the sake of the copy behind (docs/cuda.md, "Large
pools"). It costs the lookup of a later step of the same layer 1 us, which fewer rows would not get back."""
_INTEGERS = {torch.int16: "short", torch.int32: "int", torch.int64: "long long"}


class _Params(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_uint64)
            for name in (
                "keys",
                "state_rows",
                "slot_keys",
                "lru_slots",
                "slots",
                "miss_keys",
                "miss_slots",
                "miss_counts",
                "workspace",
            )
        ]
        + [
            (name, ctypes.c_int64)
            for name in (
                "workspace_stride",
                "keys_stride",
                "slot_keys_stride",
                "lru_stride",
                "slots_stride",
                "miss_keys_stride",
                "miss_slots_stride",
            )
        ]
        + [(name, ctypes.c_int32) for name in ("rows", "wanted", "cached", "table", "table_one")]
    )


def hot_cache_resolve(
    keys: Tensor,
    state_rows: Tensor,
    slot_keys: Tensor,
    lru_slots: Tensor,
    *,
    out: ResolvePlan | None = None,
) -> ResolvePlan:
    """See the contract. Fastest when K and H are at most 4096 and each row has a state of its own.

    A row's misses come in the order in which it names them, or by key where it is longer or shares its state.
    """
    plan = empty_plan(keys) if out is None else out
    _refuse_strided(plan)
    rows, wanted = keys.shape
    if rows == 0:
        return plan
    if wanted == 0 or slot_keys.shape[1] == 0:
        plan.miss_counts.zero_()
        return plan
    keys, state_rows = _dense(keys), _dense(state_rows)
    device = keys.device.index
    table = _table_size(slot_keys.shape[1])
    need = _working_bytes(table, slot_keys.shape[1], wanted, keys.element_size(), lru_slots.element_size())
    with context(device):
        in_shared = need + _STATIC_SHARED_BYTES <= max_shared_bytes(device)
        workspace = None if in_shared else torch.empty(rows * need, dtype=torch.uint8, device=keys.device)
        params = _Params(
            keys.data_ptr(),
            state_rows.data_ptr(),
            slot_keys.data_ptr(),
            lru_slots.data_ptr(),
            *(tensor.data_ptr() for tensor in plan),
            0 if workspace is None else workspace.data_ptr(),
            need,
            keys.stride(0),
            slot_keys.stride(0),
            lru_slots.stride(0),
            plan.slots.stride(0),
            plan.miss_keys.stride(0),
            plan.miss_slots.stride(0),
            rows,
            wanted,
            slot_keys.shape[1],
            table,
            min(table // 2, max(16, 1 << (4 * wanted - 1).bit_length())),
        )
        shared_bytes = need if in_shared else 0
        streams = rows >= _STREAM_FROM_ROWS
        function = _function(device, keys.dtype, lru_slots.dtype, state_rows.dtype, shared_bytes, streams)
        function.launch(rows, _THREADS, torch._C._cuda_getCurrentRawStream(device), params, shared_bytes)
    return plan


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _refuse_strided(plan: ResolvePlan) -> None:
    for name, tensor in plan._asdict().items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ContractError("hot_cache_resolve", f"out.{name}.stride", "dense rows", str(list(tensor.stride())))


def _table_size(cached: int) -> int:
    """Places of the hash table: room for all cached keys, as many misses, and one overshoot of every thread."""
    return 1 << (2 * cached + _THREADS).bit_length()


def _working_bytes(table: int, cached: int, wanted: int, key_bytes: int, slot_bytes: int) -> int:
    words = -(-cached // 32)
    total = table * key_bytes + 4 * (cached + wanted + 2 * words) + slot_bytes * (table + 2 * cached) + cached
    return -(-total // 16) * 16


@functools.lru_cache(maxsize=64)
def _function(
    device: int, key: torch.dtype, slot: torch.dtype, state: torch.dtype, shared_bytes: int, streams: bool
) -> Kernel:
    macros: dict[str, str | int] = {
        "KEY": _INTEGERS[key],
        "SLOT": _INTEGERS[slot],
        "STATE": _INTEGERS[state],
        "THREADS": _THREADS,
        "IN_SHARED": int(shared_bytes > 0),
        "STREAMS": int(streams),
    }
    function = kernel(device, "resolve_cache.cu", "resolve_cache", macros)
    if shared_bytes:
        function.allow_shared(shared_bytes)
    return function
