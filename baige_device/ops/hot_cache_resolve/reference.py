"""Reference of `hot_cache_resolve`: exact sets, one cache state after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.hot_cache_resolve.contract import ResolvePlan, empty_plan

__all__ = ["hot_cache_resolve"]


def hot_cache_resolve(
    keys: Tensor,
    state_rows: Tensor,
    slot_keys: Tensor,
    lru_slots: Tensor,
    *,
    out: ResolvePlan | None = None,
) -> ResolvePlan:
    """See the contract. Reads the state rows on the host, so it cannot be captured in a graph."""
    plan = empty_plan(keys) if out is None else out
    plan.slots.fill_(-1)
    plan.miss_keys.fill_(-1)
    plan.miss_slots.fill_(-1)
    plan.miss_counts.zero_()
    members: dict[int, list[int]] = {}
    for row, state in enumerate(state_rows.tolist()):
        if state >= 0:
            members.setdefault(state, []).append(row)
    for state, rows in members.items():
        _resolve_state(keys, torch.tensor(rows, device=keys.device), slot_keys[state], lru_slots[state], plan)
    return plan


def _resolve_state(keys: Tensor, rows: Tensor, slot_keys: Tensor, lru_slots: Tensor, plan: ResolvePlan) -> None:
    """Resolve the `rows` of `keys` that share the state `slot_keys`, `lru_slots` `[H]`; updates state and plan."""
    wanted = keys[rows].flatten()
    entries = (wanted >= 0).nonzero().squeeze(1)
    if entries.numel() == 0:
        return
    unique, inverse = torch.unique(wanted[entries], return_inverse=True)
    first = torch.full_like(unique, wanted.numel(), dtype=torch.int64).scatter_reduce(0, inverse, entries, "amin")
    slots = _find(unique, slot_keys)
    used = torch.zeros_like(slot_keys, dtype=torch.bool)
    used[slots[slots >= 0]] = True

    order = lru_slots.long()
    victims = order[~used[order]]
    missing = (slots < 0).nonzero().squeeze(1)
    # In the order in which the rows name them; the last ones stay without room when the victims run out.
    missing = missing[first[missing].argsort()][: victims.numel()]
    victims = victims[: missing.numel()]
    slots[missing] = victims
    used[victims] = True

    slot_keys[victims] = unique[missing]
    lru_slots.copy_(torch.cat([order[~used[order]], order[used[order]]]))
    found = torch.full_like(wanted, -1, dtype=torch.int64)
    found[entries] = slots[inverse]
    plan.slots[rows] = found.view(rows.numel(), -1).int()
    _list_misses(plan, rows, first[missing] // keys.shape[1], unique[missing], victims)


def _find(unique: Tensor, slot_keys: Tensor) -> Tensor:
    """The slot of each key, or -1."""
    held, slot = slot_keys.sort()
    at = torch.searchsorted(held, unique).clamp_max(held.numel() - 1)
    return torch.where(held[at] == unique, slot[at], -1)


def _list_misses(plan: ResolvePlan, rows: Tensor, owners: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Enter each missing key in the row (an ascending index into `rows`) that named it first."""
    counts = torch.bincount(owners, minlength=rows.numel())
    column = torch.arange(owners.numel(), device=owners.device) - (counts.cumsum(0) - counts)[owners]
    plan.miss_keys[rows[owners], column] = keys
    plan.miss_slots[rows[owners], column] = slots.int()
    plan.miss_counts[rows] = counts.int()
