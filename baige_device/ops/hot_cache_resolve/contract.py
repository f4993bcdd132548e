"""Contract of `hot_cache_resolve`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import (
    INDEX_DTYPES,
    Cost,
    OpContract,
    check_distinct,
    check_dtype,
    check_index_values,
    check_inner_contiguous,
    check_not_input,
    check_same_device,
    check_shape,
    check_writable,
)

__all__ = ["CONTRACT", "ResolvePlan", "empty_plan", "hot_cache_resolve"]

_OP = "hot_cache_resolve"


class ResolvePlan(NamedTuple):
    """Where every wanted key is (after the copy), and what has to be copied."""

    slots: Tensor
    """int32 `[T, K]`: the hot slot of each key; -1 for padding, padded rows, and keys that found no room."""
    miss_keys: Tensor
    """like `keys` `[T, K]`: the missing keys, compact at the front of each row, -1 behind."""
    miss_slots: Tensor
    """int32 `[T, K]`: the slot for each missing key, -1 behind."""
    miss_counts: Tensor
    """int32 `[T]`: misses of each row."""


def hot_cache_resolve(  # type: ignore[empty-body]
    keys: Tensor,
    state_rows: Tensor,
    slot_keys: Tensor,
    lru_slots: Tensor,
    *,
    out: ResolvePlan | None = None,
) -> ResolvePlan:
    """Look up each row's wanted keys in its request's hot cache, evict for the misses, and emit the plan for the copy.

    A key is any id that is unique in its request's cache: a token position (SGLang) or a host row (vLLM). After the
    call the state says that all keys are present, so the plan must be executed (`uva_sparse_gather`) before the next
    use.

    Args:
        keys: int32 or int64 `[T, K]`, -1 is padding. Duplicates are allowed and load once. K <= H.
        state_rows: int32 or int64 `[T]`: the cache state of each row; -1 marks a padded row that takes no part. Several
            rows may name one state (speculative verify): they share the union of their keys.
        slot_keys: same dtype as `keys`, `[R, H]`, updated: the key in each slot, -1 empty.
        lru_slots: int16 or int32 `[R, H]`, updated: the slots, least recently used first; always a permutation.
        out: buffers for the plan (for graphs); None allocates. Every element is written.
    Semantics: exact set semantics. A slot that any row of this call uses is not evicted in it. Victims are taken in LRU
        order. Afterwards the unused slots keep their order in front and the used ones follow (their order is open).
        A miss wanted by several rows of one state is listed once, in the first of them. When the union exceeds H, the
        keys without room get slot -1 and are in no plan; checked mode raises instead.
    Raises:
        ContractError: shapes, dtypes, K > H, a plan in the memory of `keys`; with checked values, state rows outside
            `[-1, R)`, keys below -1, one state's union > H, a key in two slots, or an `lru_slots` row that is no
            permutation.
    Cost: reads and writes the states once; no host synchronisation.
    """


def empty_plan(keys: Tensor) -> ResolvePlan:
    """Uninitialised buffers of the right shapes for `keys` `[T, K]`."""
    slots = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    counts = torch.empty(keys.shape[0], dtype=torch.int32, device=keys.device)
    return ResolvePlan(slots, torch.empty_like(keys), torch.empty_like(slots), counts)


def check(
    values: bool,
    keys: Tensor,
    state_rows: Tensor,
    slot_keys: Tensor,
    lru_slots: Tensor,
    *,
    out: ResolvePlan | None = None,
) -> None:
    check_dtype(_OP, "keys", keys, INDEX_DTYPES)
    check_dtype(_OP, "state_rows", state_rows, INDEX_DTYPES)
    check_dtype(_OP, "slot_keys", slot_keys, (keys.dtype,))
    check_dtype(_OP, "lru_slots", lru_slots, (torch.int16, torch.int32))
    check_shape(_OP, "keys", keys, ("T", "K"))
    check_shape(_OP, "state_rows", state_rows, (keys.shape[0],))
    check_shape(_OP, "slot_keys", slot_keys, ("R", "H"))
    check_shape(_OP, "lru_slots", lru_slots, tuple(slot_keys.shape))
    check_inner_contiguous(_OP, "slot_keys", slot_keys)
    check_inner_contiguous(_OP, "lru_slots", lru_slots)
    slots = slot_keys.shape[1]
    if keys.shape[1] > slots:
        raise ContractError(_OP, "keys.shape[1]", f"K <= H = {slots}", str(keys.shape[1]))
    if slots > torch.iinfo(lru_slots.dtype).max + 1:
        raise ContractError(_OP, "lru_slots.dtype", f"a dtype that holds slot {slots - 1}", str(lru_slots.dtype))
    check_same_device(_OP, keys=keys, state_rows=state_rows, slot_keys=slot_keys, lru_slots=lru_slots)
    if out is not None:
        _check_out(keys, out)
    if values:
        _check_values(keys, state_rows, slot_keys, lru_slots)


def _check_out(keys: Tensor, out: ResolvePlan) -> None:
    for name, want in zip(ResolvePlan._fields, empty_plan(keys.to("meta")), strict=True):
        have: Tensor = getattr(out, name)
        check_shape(_OP, f"out.{name}", have, tuple(want.shape))
        check_dtype(_OP, f"out.{name}", have, (want.dtype,))
        check_writable(_OP, f"out.{name}", have)
        check_not_input(_OP, f"out.{name}", have, keys=keys)
    check_same_device(_OP, keys=keys, **out._asdict())


def _check_values(keys: Tensor, state_rows: Tensor, slot_keys: Tensor, lru_slots: Tensor) -> None:
    check_index_values(_OP, "state_rows", state_rows, slot_keys.shape[0])
    check_index_values(_OP, "keys", keys, torch.iinfo(keys.dtype).max)
    for state in torch.unique(state_rows[state_rows >= 0]).tolist():
        order = lru_slots[state].long().sort().values
        wrong = (order != torch.arange(order.numel(), device=order.device)).nonzero()
        if len(wrong):
            got = f"no slot {int(wrong[0])}"
            raise ContractError(_OP, f"lru_slots[{state}]", f"a permutation of the {order.numel()} slots", got)
        check_distinct(_OP, f"slot_keys[{state}]", slot_keys[state])
        wanted = keys[state_rows == state]
        union = torch.unique(wanted[wanted >= 0]).numel()
        if union > slot_keys.shape[1]:
            raise ContractError(_OP, f"keys of state {state}", f"<= H = {slot_keys.shape[1]} distinct keys", str(union))


def cost(
    keys: Tensor,
    state_rows: Tensor,
    slot_keys: Tensor,
    lru_slots: Tensor,
    *,
    out: ResolvePlan | None = None,
) -> Cost:
    """Bytes of keys read, states read and written, and plan written."""
    rows, slots = keys.shape[0], slot_keys.shape[1]
    state = 2 * rows * slots * (slot_keys.element_size() + lru_slots.element_size())
    return Cost(keys.numel() * (2 * keys.element_size() + 8) + state)


CONTRACT = OpContract(
    _OP,
    "gather",
    hot_cache_resolve,
    check,
    cost,
    "hot_cache_resolve(Tensor keys, Tensor state_rows, Tensor(a!) slot_keys, Tensor(b!) lru_slots) -> "
    "(Tensor slots, Tensor miss_keys, Tensor miss_slots, Tensor miss_counts)",
)
