"""Cases of `hot_cache_resolve`: single calls on mid-life states, and long random walks against a dictionary model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from baige_device.testing.cases import Call, Case, bad_inputs, trial
from baige_device.testing.checks import check_untouched, expect, twins
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.oracle_resolve import verify_resolve

__all__ = ["cases"]

OP = "hot_cache_resolve"
MUTATES = ("slot_keys", "lru_slots", "out")


@dataclass(frozen=True)
class Resolve:
    """One point of the matrix."""

    rows: int = 5
    keys: int = 8
    slots: int = 16
    states: int = 7
    key_dtype: torch.dtype = torch.int32
    lru_dtype: torch.dtype = torch.int32
    state_dtype: torch.dtype = torch.int32
    padding: str = "some"
    shared: bool = False
    fresh: bool = False
    """The state is empty (all slots -1)."""
    hits: float = 0.6
    overfull: bool = False
    given_out: bool = True
    layout: str = "contiguous"
    key_high: int = 100_000

    @property
    def params(self) -> dict[str, Any]:
        return {
            "index_dtype": dtype_name(self.key_dtype),
            "hot_slots": self.slots,
            "topk": self.keys,
            "shared_states": self.shared,
        }


def cases() -> list[Case]:
    found: list[Case] = []
    for name, point, variants in _matrix():
        found += trial(
            OP,
            name,
            partial(_build, point),
            partial(verify_resolve, exact=not point.overfull),
            point.params,
            mutates=MUTATES,
            args_valid=not point.overfull,
            device_variants=variants,
        )
    found += [Case(OP, f"walk-{name}", partial(_walk, point), point.params) for name, point in _walks()]
    found.append(_bad())
    return found


def _matrix() -> list[tuple[str, Resolve, bool]]:
    base = Resolve()
    return [
        ("one-key", replace(base, rows=1, keys=1, slots=1, states=1, padding="none"), False),
        ("mid-life", base, True),
        ("empty-state", replace(base, fresh=True), False),
        ("all-hits", replace(base, hits=1.0, padding="none"), False),
        ("all-misses", replace(base, hits=0.0, padding="none"), False),
        ("k-equals-h", replace(base, keys=16, hits=0.3, padding="none"), False),
        ("padding-half", replace(base, padding="half"), False),
        ("padding-all", replace(base, padding="all"), False),
        ("padded-rows", replace(base, rows=9, states=5), True),
        ("shared-states", replace(base, rows=9, states=3, shared=True), True),
        ("int64-keys", replace(base, key_dtype=torch.int64, state_dtype=torch.int64, key_high=2**40), False),
        ("int16-lru", replace(base, lru_dtype=torch.int16), False),
        ("result-allocated", replace(base, given_out=False), False),
        ("strided-keys", replace(base, layout="step-2"), False),
        ("transposed-keys", replace(base, layout="transposed"), False),
        ("padded-state-stride", replace(base, layout="state-gap"), False),
        ("no-rows", replace(base, rows=0), False),
        ("no-keys", replace(base, keys=0), False),
        ("no-states", replace(base, rows=3, states=0), False),
        ("topk-2048-hot-4096", replace(base, rows=3, keys=2048, slots=4096, states=3, lru_dtype=torch.int16), False),
        ("topk-129-hot-257", replace(base, rows=4, keys=129, slots=257, states=4), False),
        ("union-over-hot", replace(base, rows=9, states=3, shared=True, overfull=True, keys=12), False),
    ]


def _walks() -> list[tuple[str, Resolve]]:
    base = Resolve(padding="some", fresh=True)
    return [
        ("one-state", replace(base, rows=1, states=1)),
        ("many-states", replace(base, rows=5, states=4)),
        ("shared-states", replace(base, rows=6, states=2, shared=True, slots=24)),
        ("tight", replace(base, rows=3, states=3, keys=8, slots=8, lru_dtype=torch.int16)),
        ("int64", replace(base, key_dtype=torch.int64, state_dtype=torch.int64, key_high=2**40)),
    ]


def _build(point: Resolve, lab: Lab) -> dict[str, Any]:
    slot_keys, lru_slots = _state(point, lab)
    return _call_args(point, lab, slot_keys, lru_slots)


def _call_args(point: Resolve, lab: Lab, slot_keys: Tensor, lru_slots: Tensor) -> dict[str, Any]:
    states = _state_rows(point, lab)
    keys = _keys(point, lab, slot_keys, states)
    args: dict[str, Any] = {
        "keys": _arrange(lab, point.layout, keys),
        "state_rows": lab.tensor(states, point.state_dtype),
        "slot_keys": slot_keys,
        "lru_slots": lru_slots,
    }
    if point.given_out:
        shape = (point.rows, point.keys)
        args["out"] = ResolvePlan(
            lab.out(shape, torch.int32),
            lab.out(shape, point.key_dtype),
            lab.out(shape, torch.int32),
            lab.out((point.rows,), torch.int32),
        )
    return args


def _state(point: Resolve, lab: Lab) -> tuple[Tensor, Tensor]:
    gap = 3 if point.layout == "state-gap" else 0
    slot_keys = _rows_with_gap(lab, point.states, point.slots, point.key_dtype, gap)
    lru_slots = _rows_with_gap(lab, point.states, point.slots, point.lru_dtype, gap)
    slot_keys.fill_(-1)
    for state in range(point.states):
        lru_slots[state] = lab.permutation(point.slots, dtype=point.lru_dtype)
        if not point.fresh:
            filled = point.slots - state % 3
            chosen = lab.random.sample(range(point.key_high), filled)
            order = lab.permutation(point.slots, filled)
            slot_keys[state, order] = lab.tensor(chosen, point.key_dtype)
    return slot_keys, lru_slots


def _rows_with_gap(lab: Lab, rows: int, width: int, dtype: torch.dtype, gap: int) -> Tensor:
    return lab.out((rows, width + gap), dtype)[:, :width]


def _state_rows(point: Resolve, lab: Lab) -> list[int]:
    if point.shared:
        return [lab.random.randrange(-1, point.states) for _ in range(point.rows)]
    order = list(range(point.states)) + [-1] * max(point.rows - point.states, 1)
    lab.random.shuffle(order)
    return order[: point.rows]


def _keys(point: Resolve, lab: Lab, slot_keys: Tensor, states: list[int]) -> Tensor:
    """Keys of each row, drawn with repetition from a candidate set of its state that fits the hot cache."""
    candidates: dict[int, list[int]] = {}
    rows = []
    for state in states:
        if state not in candidates:
            candidates[state] = _candidates(point, lab, slot_keys, state)
        rows.append([_key(point, lab, candidates[state], place) for place in range(point.keys)])
    return lab.tensor(rows, point.key_dtype).view(point.rows, point.keys)


def _candidates(point: Resolve, lab: Lab, slot_keys: Tensor, state: int) -> list[int]:
    present = [key for key in slot_keys[state].tolist() if key >= 0] if state >= 0 else []
    size = 3 * point.slots if point.overfull else point.slots
    count = min(size, point.keys * (4 if point.shared else 1))
    hits = lab.random.sample(present, min(len(present), round(count * point.hits)))
    taken = set(present)
    while len(hits) < count and point.hits < 1:
        key = lab.random.randrange(point.key_high)
        if key not in taken:
            taken.add(key)
            hits.append(key)
    lab.random.shuffle(hits)
    return hits or [0]


def _key(point: Resolve, lab: Lab, candidates: list[int], place: int) -> int:
    chance = {"none": 0.0, "some": 0.15, "half": 0.5, "all": 1.0}[point.padding]
    if lab.random.random() < chance:
        return -1
    if point.padding == "none" and not point.shared:
        return candidates[place % len(candidates)]
    return lab.random.choice(candidates)


def _arrange(lab: Lab, layout: str, keys: Tensor) -> Tensor:
    if layout == "transposed":
        return keys.t().contiguous().t()
    if layout == "step-2":
        wide = torch.full((keys.shape[0], 2 * keys.shape[1]), 5, dtype=keys.dtype, device=lab.device)
        wide[:, ::2] = keys
        return wide[:, ::2]
    return keys


def _walk(point: Resolve, lab: Lab) -> float:
    """200 calls on one set of states; a dictionary of last uses says which keys may have been evicted."""
    slot_keys, lru_slots = _state(point, lab)
    last_use: list[dict[int, int]] = [{} for _ in range(point.states)]
    pools = [lab.random.sample(range(point.key_high), 3 * point.slots) for _ in range(point.states)]
    for step in range(200):
        args = _call_args(replace(point, hits=0.7), lab, slot_keys, lru_slots)
        args["keys"] = _revisit(lab, args["keys"], args["state_rows"], pools, point)
        before = twins(args)
        result = lab.ops.hot_cache_resolve(**args)
        lab.synchronize()
        check_untouched(args, before, MUTATES)
        verify_resolve(Call(args, before, result))
        _follow(step, args, slot_keys, last_use)
    return 0.0


def _revisit(lab: Lab, keys: Tensor, state_rows: Tensor, pools: list[list[int]], point: Resolve) -> Tensor:
    """Draw keys from a pool three times the hot cache, so that they are evicted and come back."""
    chosen: dict[int, list[int]] = {}
    rows = keys.tolist()
    for row, state in enumerate(state_rows.tolist()):
        if state >= 0:
            room = chosen.setdefault(state, lab.random.sample(pools[state], min(point.slots, 2 * point.keys)))
            rows[row] = [-1 if key < 0 else lab.random.choice(room) for key in rows[row]]
    return lab.tensor(rows, point.key_dtype).view(keys.shape)


def _follow(step: int, args: dict[str, Any], slot_keys: Tensor, last_use: list[dict[int, int]]) -> None:
    present = [{key for key in row if key >= 0} for row in slot_keys.tolist()]
    for keys, state in zip(args["keys"].tolist(), args["state_rows"].tolist(), strict=True):
        for key in keys:
            if state >= 0 and key >= 0:
                last_use[state][key] = step
    for state, uses in enumerate(last_use):
        gone = [use for key, use in uses.items() if key not in present[state]]
        kept = [uses[key] for key in present[state] if uses[key] < step]
        expect(
            not gone or not kept or max(gone) <= min(kept),
            f"step {step}, state {state}: a key last used at step {max(gone, default=-1)} was evicted while one last "
            f"used at step {min(kept, default=-1)} stayed",
        )
        last_use[state] = {key: uses[key] for key in present[state]}


def _bad() -> Case:
    point = Resolve()
    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "state_rows: beyond": lambda lab, args: {"state_rows": torch.full_like(args["state_rows"], point.states)},
        "state_rows: -2": lambda lab, args: {"state_rows": torch.full_like(args["state_rows"], -2)},
        "keys.shape: more than the slots": lambda lab, args: {
            "keys": lab.integers(0, 9, point.rows, point.slots + 1, dtype=torch.int32),
            "out": None,
        },
        "keys.dtype": lambda lab, args: {"keys": args["keys"].float()},
        "slot_keys.dtype": lambda lab, args: {"slot_keys": args["slot_keys"].long()},
        "lru_slots.dtype": lambda lab, args: {"lru_slots": args["lru_slots"].long()},
        "lru_slots: no permutation": lambda lab, args: {"lru_slots": torch.zeros_like(args["lru_slots"])},
        "keys of state: union over the slots": lambda lab, args: _one_state_overfull(point, lab),
        "out.slots": lambda lab, args: {"out": args["out"]._replace(slots=args["out"].slots.long())},
    }
    return bad_inputs(OP, partial(_build, replace(point, padding="none")), changes, point.params)


def _one_state_overfull(point: Resolve, lab: Lab) -> dict[str, Any]:
    keys = torch.arange(point.rows * point.keys, dtype=point.key_dtype, device=lab.device)
    return {"keys": keys.view(point.rows, point.keys), "state_rows": lab.tensor([0] * point.rows, torch.int32)}
