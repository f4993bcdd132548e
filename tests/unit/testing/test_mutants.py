"""The kit flags every deliberately broken backend."""

from __future__ import annotations

import pytest

from baige_device.ops import OP_NAMES
from baige_device.testing.cases import all_cases
from baige_device.testing.runner import Outcome, Runner, open_backend
from tests.unit.testing.mutants import MUTANTS, Mutation, broken_source

_LARGE = ("wraps_offsets_at_32_bits", "wraps_kv_offsets_at_32_bits")


def _first_failure(op: str, mutation: Mutation, large: bool) -> Outcome | None:
    backend, device = open_backend("broken", candidates=[broken_source(op, mutation)])
    runner = Runner(backend, device, seed=11, large=large)
    for case in all_cases([op]):
        if large and "large" not in case.tags:
            continue
        outcome = runner.run(case)
        if outcome.status == "failed":
            return outcome
    return None


@pytest.mark.parametrize(("op", "bug"), [pytest.param(op, bug, id=f"{op}-{bug}") for op, bug in MUTANTS])
def test_kit_flags(op: str, bug: str) -> None:
    outcome = _first_failure(op, MUTANTS[op, bug], large=bug in _LARGE)
    assert outcome is not None, f"the kit does not notice that {op} {bug.replace('_', ' ')}"
    assert outcome.reason


def test_every_op_is_mutated() -> None:
    assert {op for op, _ in MUTANTS} == set(OP_NAMES)
