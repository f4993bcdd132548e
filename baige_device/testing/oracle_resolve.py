"""What one `hot_cache_resolve` call must have done to states and plan, in sets and dictionaries."""

from __future__ import annotations

from typing import Any

from baige_device.ops.hot_cache_resolve.contract import ResolvePlan, empty_plan
from baige_device.testing.cases import Call
from baige_device.testing.checks import check_list, check_members, expect, few

__all__ = ["verify_resolve"]


def verify_resolve(call: Call, exact: bool = True) -> float:
    """Check one finished call; `exact=False` when a union exceeds the slots, which leaves open who gets no room."""
    plan = _plan(call)
    rows: dict[int, list[int]] = {}
    for row, state in enumerate(call.before["state_rows"].tolist()):
        if state >= 0:
            rows.setdefault(state, []).append(row)
        else:
            _check_padded(plan, row)
    for state in range(call.before["slot_keys"].shape[0]):
        old_keys, new_keys = (args["slot_keys"][state].tolist() for args in (call.before, call.args))
        old_lru, new_lru = (args["lru_slots"][state].tolist() for args in (call.before, call.args))
        if state not in rows:
            expect(old_keys == new_keys and old_lru == new_lru, f"state {state}: no row names it, and it was changed")
            continue
        wanted = {row: call.before["keys"][row].tolist() for row in rows[state]}
        assigned = _check_slots(plan, state, wanted, old_keys, len(old_keys), exact)
        loaded = _check_misses(plan, state, wanted, assigned, set(old_keys))
        _check_state(state, assigned, loaded, old_keys, new_keys, old_lru, new_lru)
    return 0.0


def _plan(call: Call) -> dict[str, Any]:
    result, given = call.result, call.args.get("out")
    # Its users read the fields by name, which another tuple has not.
    expect(isinstance(result, ResolvePlan), f"result: expected a ResolvePlan, got {type(result).__name__}")
    like = empty_plan(call.before["keys"])
    for name, tensor, want in zip(ResolvePlan._fields, result, like, strict=True):
        expect(
            tuple(tensor.shape) == tuple(want.shape),
            f"{name}.shape: expected {list(want.shape)}, got {list(tensor.shape)}",
        )
        expect(tensor.dtype == want.dtype, f"{name}.dtype: expected {want.dtype}, got {tensor.dtype}")
        if given is not None:
            expect(tensor.data_ptr() == getattr(given, name).data_ptr(), f"{name}: expected the buffer given as out")
    return {name: tensor.tolist() for name, tensor in zip(ResolvePlan._fields, result, strict=True)}


def _check_padded(plan: dict[str, Any], row: int) -> None:
    for name in ("slots", "miss_keys", "miss_slots"):
        expect(set(plan[name][row]) <= {-1}, f"{name}[{row}]: expected -1 in a padded row, got {few(plan[name][row])}")
    expect(
        plan["miss_counts"][row] == 0, f"miss_counts[{row}]: expected 0 in a padded row, got {plan['miss_counts'][row]}"
    )


def _check_slots(
    plan: dict[str, Any], state: int, wanted: dict[int, list[int]], old_keys: list[int], slots: int, exact: bool
) -> dict[int, int]:
    """Every occurrence of a key has the same slot; hits keep theirs; returns key -> slot."""
    old_slot = {key: slot for slot, key in enumerate(old_keys) if key >= 0}
    assigned: dict[int, int] = {}
    union = {key for keys in wanted.values() for key in keys if key >= 0}
    for row, keys in wanted.items():
        for place, (key, slot) in enumerate(zip(keys, plan["slots"][row], strict=True)):
            where = f"slots[{row}, {place}] (state {state}, key {key})"
            if key < 0:
                expect(slot == -1, f"{where}: expected -1 for padding, got {slot}")
                continue
            if key in old_slot:
                expect(slot == old_slot[key], f"{where}: a hit in slot {old_slot[key]}, got {slot}")
            expect(not exact or 0 <= slot < slots, f"{where}: expected a slot in [0, {slots}), got {slot}")
            expect(assigned.setdefault(key, slot) == slot, f"{where}: one key got slots {assigned[key]} and {slot}")
    placed = {key: slot for key, slot in assigned.items() if slot >= 0}
    key_in: dict[int, int] = {}
    for key, slot in placed.items():
        other = key_in.setdefault(slot, key)
        expect(other == key, f"state {state}: keys {other} and {key} share slot {slot}")
    expect(
        len(placed) == min(len(union), slots),
        f"state {state}: {len(placed)} of {len(union)} keys placed in {slots} slots",
    )
    return placed


def _check_misses(
    plan: dict[str, Any], state: int, wanted: dict[int, list[int]], assigned: dict[int, int], old: set[int]
) -> dict[int, int]:
    """Each miss is listed once, in the first row that wants it, compact, with its slot; returns slot -> key."""
    seen: set[int] = set()
    loaded: dict[int, int] = {}
    for row, keys in wanted.items():
        due = {key for key in keys if key in assigned and key not in old and key not in seen}
        seen |= due
        count = plan["miss_counts"][row]
        listed, slots = plan["miss_keys"][row], plan["miss_slots"][row]
        where = f"row {row} (state {state})"
        expect(count == len(due), f"miss_counts[{row}]: expected {len(due)}, got {count}")
        check_members(f"{where}: misses", listed[:count], sorted(due))
        expect(
            set(listed[count:]) <= {-1} and set(slots[count:]) <= {-1}, f"{where}: entries behind the count are not -1"
        )
        for key, slot in zip(listed[:count], slots[:count], strict=True):
            expect(slot == assigned[key], f"{where}: key {key} is in slot {assigned[key]} but loads into {slot}")
            loaded[slot] = key
    return loaded


def _check_state(
    state: int,
    assigned: dict[int, int],
    loaded: dict[int, int],
    old_keys: list[int],
    new_keys: list[int],
    old_lru: list[int],
    new_lru: list[int],
) -> None:
    hit_slots = {slot for key, slot in assigned.items() if slot not in loaded}
    victims = [slot for slot in old_lru if slot not in hit_slots][: len(loaded)]
    check_members(f"state {state}: victims (the least recently used slots)", sorted(loaded), victims)
    check_list(f"slot_keys[{state}]", new_keys, [loaded.get(slot, key) for slot, key in enumerate(old_keys)])
    used = set(assigned.values())
    unused = [slot for slot in old_lru if slot not in used]
    front, back = new_lru[: len(unused)], new_lru[len(unused) :]
    check_list(f"lru_slots[{state}] (the unused slots, in front in their order)", front, unused)
    check_members(f"lru_slots[{state}] (the used slots, behind)", back, sorted(used))
