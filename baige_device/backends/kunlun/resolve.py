"""`hot_cache_resolve` in plain torch on the device: sorts and scatters of fixed shapes, no sync, graph-capturable.

No vendor op does this. Every row of a state computes that state's whole outcome, so that rows which share a state
write identical results and no ordering between them matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.kunlun import rows
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
    """See the contract. Cost: one sort of each row's H slots and two sorts of all T·K keys."""
    plan = empty_plan(keys) if out is None else out
    if 0 in keys.shape or 0 in slot_keys.shape:
        for tensor, value in zip(plan, (-1, -1, -1, 0), strict=True):
            tensor.fill_(value)
        return plan
    wanted = torch.where((state_rows >= 0).unsqueeze(1), keys, -1)
    states = state_rows.to(torch.int64)
    leaders = _leaders(states)
    held, order = slot_keys[states.clamp(min=0)], lru_slots[states.clamp(min=0)].to(torch.int64)

    hit_slots = _find(held, wanted)
    used = _mark(hit_slots, leaders, held.shape[1])
    heads, groups = _first_of_each(states, wanted, hit_slots)
    unused_first = _stable_partition(order, used)
    room = held.shape[1] - used.sum(1)
    rank = _rank_in_state(heads, leaders)
    loaded = heads & (rank < room.unsqueeze(1))
    victims = unused_first.gather(1, rank.clamp(max=held.shape[1] - 1))
    miss_slots = torch.where(loaded, victims, -1)

    slots = torch.where(hit_slots >= 0, hit_slots, _from_heads(miss_slots, groups))
    plan.slots.copy_(torch.where(wanted >= 0, slots, -1))
    _write_plan(plan, wanted, miss_slots, loaded)
    _update_states(states, leaders, wanted, miss_slots, used, held, order, slot_keys, lru_slots)
    return plan


def _leaders(states: Tensor) -> Tensor:
    """`[T]`: the first row with the same state. T is small (rows of a step), so all pairs are compared."""
    return (states.unsqueeze(1) == states.unsqueeze(0)).to(torch.int32).argmax(1)


def _find(held: Tensor, wanted: Tensor) -> Tensor:
    """The slot `[T, K]` in which each wanted key is held, -1 when it is not or is padding."""
    ordered, slots = held.sort(dim=1)
    at = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=held.shape[1] - 1)
    found = (ordered.gather(1, at) == wanted) & (wanted >= 0)
    return torch.where(found, slots.gather(1, at), -1)


def _mark(slots: Tensor, leaders: Tensor, num_slots: int) -> Tensor:
    """bool `[T, H]`: is the slot named by any row of the same state? -1 marks nothing."""
    table = torch.zeros(slots.shape[0], num_slots + 1, dtype=torch.bool, device=slots.device)
    row = leaders.unsqueeze(1).expand_as(slots)
    table.index_put_((row, torch.where(slots >= 0, slots, num_slots)), torch.ones_like(slots, dtype=torch.bool))
    return table[leaders, :num_slots]


def _first_of_each(states: Tensor, wanted: Tensor, hit_slots: Tensor) -> tuple[Tensor, Tensor]:
    """Of equal missing keys of a state the first: bool `[T, K]`, and each entry's flat index of its first `[T, K]`."""
    flat_keys = wanted.flatten()
    flat_states = states.unsqueeze(1).expand_as(wanted).flatten()
    by_key = flat_keys.argsort(stable=True)
    order = by_key[flat_states[by_key].argsort(stable=True)]
    key, state = flat_keys[order], flat_states[order]
    starts = torch.ones_like(key, dtype=torch.bool)
    starts[1:] = (key[1:] != key[:-1]) | (state[1:] != state[:-1])
    group = starts.to(torch.int64).cumsum(0) - 1
    first_of_group = torch.zeros_like(group)
    # Only starts write their own group; the others write to a spare cell behind the last group.
    spare = torch.cat([first_of_group, first_of_group[:1]])
    spare.scatter_(0, torch.where(starts, group, group.shape[0]), order)
    firsts = torch.empty_like(order).scatter_(0, order, spare[group]).view_as(wanted)
    own = torch.arange(flat_keys.shape[0], device=wanted.device).view_as(wanted)
    return (firsts == own) & (wanted >= 0) & (hit_slots < 0), firsts


def _rank_in_state(heads: Tensor, leaders: Tensor) -> Tensor:
    """int64 `[T, K]`: how many heads of the same state come before this entry, rows first."""
    per_row = heads.sum(1)
    same_before = (leaders.unsqueeze(1) == leaders.unsqueeze(0)).tril(-1)
    before = (same_before * per_row).sum(1)
    return before.unsqueeze(1) + heads.to(torch.int64).cumsum(1) - heads.to(torch.int64)


def _from_heads(miss_slots: Tensor, firsts: Tensor) -> Tensor:
    """Every entry's slot, taken from the first entry with its key."""
    return miss_slots.flatten()[firsts]


def _stable_partition(values: Tensor, marked: Tensor) -> Tensor:
    """Each row's values with those whose slot is not marked in front; both parts keep their order."""
    return values.gather(1, marked.gather(1, values).to(torch.int32).argsort(dim=1, stable=True))


def _write_plan(plan: ResolvePlan, wanted: Tensor, miss_slots: Tensor, loaded: Tensor) -> None:
    front = (~loaded).to(torch.int32).argsort(dim=1, stable=True)
    plan.miss_keys.copy_(torch.where(loaded, wanted, -1).gather(1, front))
    plan.miss_slots.copy_(miss_slots.gather(1, front))
    plan.miss_counts.copy_(loaded.sum(1))


def _update_states(
    states: Tensor,
    leaders: Tensor,
    wanted: Tensor,
    miss_slots: Tensor,
    used: Tensor,
    held: Tensor,
    order: Tensor,
    slot_keys: Tensor,
    lru_slots: Tensor,
) -> None:
    """Write the new keys and the new order of every named state."""
    num_slots = held.shape[1]
    table = torch.nn.functional.pad(held, (0, 1))
    row = leaders.unsqueeze(1).expand_as(miss_slots)
    table.index_put_((row, torch.where(miss_slots >= 0, miss_slots, num_slots)), wanted)
    new_keys = table[leaders, :num_slots]
    new_order = _stable_partition(order, used | _mark(miss_slots, leaders, num_slots))
    rows.put_rows(slot_keys.unsqueeze(1), states, new_keys)
    rows.put_rows(lru_slots.unsqueeze(1), states, new_order)
