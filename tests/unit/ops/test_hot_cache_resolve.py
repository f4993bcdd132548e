"""hot_cache_resolve against a cache written with dictionaries, over many steps."""

from __future__ import annotations

import random

import pytest
import torch

from baige_device.errors import ContractError
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from baige_device.ops.hot_cache_resolve.reference import hot_cache_resolve as unchecked
from baige_device.registry.table import OpTable


def states(count: int, slots: int, key_dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count, slots), -1, dtype=key_dtype), torch.arange(slots, dtype=torch.int16).repeat(count, 1)


def poisoned(keys: torch.Tensor) -> ResolvePlan:
    shape = tuple(keys.shape)
    slots = torch.full(shape, 123456, dtype=torch.int32)
    counts = torch.full(shape[:1], 123456, dtype=torch.int32)
    return ResolvePlan(slots, torch.full_like(keys, 123456), slots.clone(), counts)


class DictCache:
    """One state: slot of each key, slots in LRU order."""

    def __init__(self, slots: int) -> None:
        self.slot_of: dict[int, int] = {}
        self.order = list(range(slots))

    def step(self, rows: list[list[int]]) -> list[list[tuple[int, int]]]:
        """Returns the (key, slot) pairs that each row must load."""
        wanted = list(dict.fromkeys(key for row in rows for key in row if key >= 0))
        held = {self.slot_of[key] for key in wanted if key in self.slot_of}
        victims = [slot for slot in self.order if slot not in held]
        loads: list[list[tuple[int, int]]] = [[] for _ in rows]
        for key in wanted:
            if key in self.slot_of or not victims:
                continue
            slot = victims.pop(0)
            self.slot_of = {k: s for k, s in self.slot_of.items() if s != slot} | {key: slot}
            loads[next(i for i, row in enumerate(rows) if key in row)].append((key, slot))
            held.add(slot)
        self.order = [slot for slot in self.order if slot not in held]  # the unused ones, in order
        return loads

    def settle(self, order: list[int]) -> None:
        """Take over the real order of the used slots, which the contract leaves open."""
        assert order[: len(self.order)] == self.order
        assert sorted(order) == list(range(len(order)))
        self.order = order


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("key_dtype", [torch.int32, torch.int64])
def test_many_steps(ops: OpTable, seed: int, key_dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    slot_keys, lru_slots = states(3, 16, key_dtype)
    models = [DictCache(16) for _ in range(3)]
    for _ in range(40):
        # Row 0 and 3 share a state (at most 8 + 8 keys); row 2 is padding.
        owners = [0, 2, -1, 0]
        rows = [[rng.choice([-1, rng.randrange(40)]) for _ in range(8)] for _ in owners]
        keys = torch.tensor(rows, dtype=key_dtype)
        plan = poisoned(keys)
        ops.hot_cache_resolve(keys, torch.tensor(owners, dtype=torch.int32), slot_keys, lru_slots, out=plan)
        for state in (0, 2):
            members = [t for t, owner in enumerate(owners) if owner == state]
            loads = models[state].step([rows[t] for t in members])
            models[state].settle(lru_slots[state].tolist())
            for t, load in zip(members, loads, strict=True):
                count = int(plan.miss_counts[t])
                pairs = zip(plan.miss_keys[t].tolist(), plan.miss_slots[t].tolist(), strict=True)
                assert list(pairs) == load + [(-1, -1)] * (8 - count)
                assert plan.slots[t].tolist() == [models[state].slot_of.get(key, -1) for key in rows[t]]
            assert {k: s for s, k in enumerate(slot_keys[state].tolist()) if k >= 0} == models[state].slot_of
        assert plan.slots[2].tolist() == [-1] * 8
        assert plan.miss_keys[2].tolist() == [-1] * 8
        assert int(plan.miss_counts[2]) == 0
    assert slot_keys[1].eq(-1).all()


def test_victims_are_the_least_recently_used(ops: OpTable) -> None:
    slot_keys, lru_slots = torch.tensor([[10, 11, 12, 13]]), torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    plan = ops.hot_cache_resolve(torch.tensor([[20, 10, 21]]), torch.tensor([0]), slot_keys, lru_slots)
    assert plan.slots.tolist() == [[2, 0, 3]]
    assert plan.miss_keys.tolist() == [[20, 21, -1]]
    assert plan.miss_slots.tolist() == [[2, 3, -1]]
    assert slot_keys.tolist() == [[10, 11, 20, 21]]
    assert lru_slots[0, 0] == 1


def test_more_keys_than_slots_leaves_the_last_ones_out() -> None:
    slot_keys, lru_slots = states(1, 3)
    plan = unchecked(torch.tensor([[1, 2, -1], [3, 2, 4]]), torch.tensor([0, 0]), slot_keys, lru_slots)
    assert plan.slots.tolist() == [[0, 1, -1], [2, 1, -1]]
    assert plan.miss_counts.tolist() == [2, 1]
    assert slot_keys.tolist() == [[1, 2, 3]]


def test_more_keys_than_slots_is_refused_in_checked_mode(ops: OpTable) -> None:
    with pytest.raises(ContractError, match="keys of state 0: expected <= H = 3 distinct keys, got 4"):
        ops.hot_cache_resolve(torch.tensor([[1, 2, -1], [3, 2, 4]]), torch.tensor([0, 0]), *states(1, 3))


@pytest.mark.parametrize(("rows", "k"), [(0, 4), (2, 0)])
def test_empty(ops: OpTable, rows: int, k: int) -> None:
    keys = torch.zeros(rows, k, dtype=torch.int64)
    plan = ops.hot_cache_resolve(keys, torch.zeros(rows, dtype=torch.int64), *states(1, 4))
    assert plan.slots.shape == (rows, k)
    assert plan.miss_counts.tolist() == [0] * rows
