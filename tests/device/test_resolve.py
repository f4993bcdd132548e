"""The hot cache on the GPU, against the contract's sentences checked one by one on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baige_device.backends.cuda.resolve import hot_cache_resolve
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan, empty_plan
from tests.device.gpu import captured, needs_gpu

pytestmark = [needs_gpu, pytest.mark.device]


def fresh_state(states: int, slots: int, key: torch.dtype, slot: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty caches with a random LRU order."""
    order = torch.stack([torch.randperm(slots) for _ in range(states)])
    return torch.full((states, slots), -1, dtype=key, device="cuda"), order.to(slot).cuda()


def poisoned(keys: Tensor) -> ResolvePlan:
    plan = empty_plan(keys)
    for tensor in plan:
        tensor.fill_(-77)
    return plan


def verify(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], keys: Tensor, rows: Tensor, plan: ResolvePlan):
    """Every sentence of the contract, for every state. All tensors on the CPU."""
    old_keys, old_order, new_keys, new_order = (t.tolist() for t in (*before, *after))
    slots, miss_keys, miss_slots, counts = (t.tolist() for t in plan)
    members: dict[int, list[int]] = {}
    for t, state in enumerate(rows.tolist()):
        if state < 0:
            assert slots[t] == [-1] * keys.shape[1]
            assert counts[t] == 0
        else:
            members.setdefault(state, []).append(t)
        assert miss_keys[t][counts[t] :] == [-1] * (keys.shape[1] - counts[t])
        assert miss_slots[t][counts[t] :] == [-1] * (keys.shape[1] - counts[t])
    for state in range(len(old_keys)):
        if state not in members:
            assert old_keys[state] == new_keys[state]
            assert old_order[state] == new_order[state]
            continue
        wanted = {t: keys[t].tolist() for t in members[state]}
        union = {k for row in wanted.values() for k in row if k >= 0}
        held = {k: s for s, k in enumerate(old_keys[state]) if k >= 0}
        hits = union & held.keys()
        used = {held[k] for k in hits}
        free = [s for s in old_order[state] if s not in used]
        missing = union - held.keys()
        loaded = min(len(missing), len(free))
        listed = [(k, s) for t in members[state] for k, s in zip(miss_keys[t], miss_slots[t], strict=True) if k >= 0]
        assert len(listed) == len({k for k, _ in listed}) == loaded
        assert {k for k, _ in listed} <= missing
        assert {s for _, s in listed} == set(free[:loaded])
        want_keys = list(old_keys[state])
        for k, s in listed:
            want_keys[s] = k
        assert new_keys[state] == want_keys
        assert new_order[state][: len(free) - loaded] == free[loaded:]
        assert set(new_order[state][len(free) - loaded :]) == used | {s for _, s in listed}
        place = {k: s for s, k in enumerate(want_keys) if k >= 0 and (k in hits or (k, s) in set(listed))}
        seen: set[int] = set()
        for t in members[state]:
            assert slots[t] == [place.get(k, -1) if k >= 0 else -1 for k in wanted[t]]
            mine = [k for k in miss_keys[t] if k >= 0]
            if len(wanted) > 1:
                assert mine == sorted(mine)
            elif len(set(wanted[t])) == len(wanted[t]) and len(want_keys) <= 4096:
                assert mine == [k for k in wanted[t] if k in set(mine)]
            assert set(mine) <= set(wanted[t]) - seen
            seen |= set(wanted[t])


def run_checked(keys: Tensor, rows: Tensor, slot_keys: Tensor, order: Tensor) -> ResolvePlan:
    before = slot_keys.cpu(), order.cpu()
    plan = poisoned(keys)
    hot_cache_resolve(keys, rows, slot_keys, order, out=plan)
    verify(before, (slot_keys.cpu(), order.cpu()), keys.cpu(), rows.cpu(), ResolvePlan(*(t.cpu() for t in plan)))
    return plan


@pytest.mark.parametrize(
    ("wanted", "slots", "key", "slot"),
    [
        (1, 1, torch.int32, torch.int16),
        (5, 7, torch.int64, torch.int32),
        (64, 100, torch.int32, torch.int16),
        (2048, 4096, torch.int32, torch.int16),
        (2048, 4096, torch.int64, torch.int16),
        (2048, 2048, torch.int32, torch.int32),
        (1500, 6000, torch.int64, torch.int32),
        (3000, 32768, torch.int32, torch.int16),
        (500, 40000, torch.int64, torch.int32),
    ],
)
def test_stream_of_steps(wanted: int, slots: int, key: torch.dtype, slot: torch.dtype) -> None:
    torch.manual_seed(wanted)
    context = 4 * slots + 10
    slot_keys, order = fresh_state(4, slots, key, slot)
    keys = torch.stack([torch.randperm(context)[:wanted] for _ in range(3)])
    for step in range(5):
        new = torch.randint(-1, context, keys.shape)
        keys = torch.where(torch.rand(keys.shape) < 0.2, new, keys)
        if step == 2:
            keys = torch.randint(0, context, keys.shape)
        rows = torch.tensor([[2, 0, 3], [-1, 1, 0], [3, -1, 1], [0, 1, 2], [1, 2, -1]][step])
        run_checked(keys.to(key).cuda(), rows.cuda(), slot_keys, order)


@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
def test_rows_that_share_a_state(rows_dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    slot_keys, order = fresh_state(3, 512, torch.int32, torch.int16)
    for _ in range(4):
        keys = torch.randint(-1, 300, (9, 80), dtype=torch.int32, device="cuda")
        rows = torch.tensor([2, 1, 2, -1, 1, 1, 2, 0, 2], dtype=rows_dtype, device="cuda")
        run_checked(keys, rows, slot_keys, order)


def test_more_distinct_keys_than_slots() -> None:
    torch.manual_seed(4)
    slot_keys, order = fresh_state(2, 64, torch.int32, torch.int16)
    for _ in range(3):
        keys = torch.randint(0, 5000, (6, 64), dtype=torch.int32, device="cuda")
        run_checked(keys, torch.tensor([0, 0, 1, 0, 1, 0], device="cuda"), slot_keys, order)


def test_clustered_and_huge_keys() -> None:
    torch.manual_seed(5)
    slot_keys, order = fresh_state(1, 4096, torch.int64, torch.int16)
    keys = torch.cat([torch.randperm(2047), torch.tensor([(1 << 62) + 5])])[None].cuda()
    run_checked(keys, torch.zeros(1, dtype=torch.int64, device="cuda"), slot_keys, order)
    run_checked(keys.flip(1), torch.zeros(1, dtype=torch.int64, device="cuda"), slot_keys, order)


def test_strided_state_and_empty_rows() -> None:
    big = torch.full((3, 200), -1, dtype=torch.int32, device="cuda")
    order = torch.arange(100, dtype=torch.int32, device="cuda").repeat(3, 2)
    keys = torch.full((2, 50), -1, dtype=torch.int32, device="cuda")
    keys[1] = torch.arange(50)
    run_checked(keys, torch.tensor([0, 2], device="cuda"), big[:, :100], order[:, :100])
    assert bool((big[:, 100:] == -1).all())
    empty = hot_cache_resolve(keys[:0], torch.empty(0, dtype=torch.int32, device="cuda"), big[:, :100], order[:, :100])
    assert empty.slots.shape == (0, 50)


def test_graph_replays_with_other_keys_and_padded_rows() -> None:
    torch.manual_seed(6)
    slot_keys, order = fresh_state(8, 256, torch.int32, torch.int16)
    keys = torch.zeros(8, 64, dtype=torch.int32, device="cuda")
    rows = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    plan = empty_plan(keys)
    graph = captured(lambda: hot_cache_resolve(keys, rows, slot_keys, order, out=plan))
    for live in (8, 3, 0, 5):
        keys.copy_(torch.randint(-1, 500, keys.shape))
        rows.fill_(-1)
        rows[:live] = torch.randperm(8)[:live].int().cuda()
        before = slot_keys.cpu(), order.cpu()
        for tensor in plan:
            tensor.fill_(-77)
        graph.replay()
        verify(before, (slot_keys.cpu(), order.cpu()), keys.cpu(), rows.cpu(), ResolvePlan(*(t.cpu() for t in plan)))


def test_two_runs_give_the_same_plan() -> None:
    torch.manual_seed(7)
    keys = torch.stack([torch.randperm(60000, dtype=torch.int32, device="cuda")[:2048] for _ in range(16)])
    rows = torch.arange(16, device="cuda")
    states = [fresh_state(16, 4096, torch.int32, torch.int16) for _ in range(2)]
    states[1][1].copy_(states[0][1])
    first, second = (hot_cache_resolve(keys, rows, *state) for state in states)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
