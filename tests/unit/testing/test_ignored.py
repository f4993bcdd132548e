"""The kit notices a backend that ignores a parameter, in every case that is listed for it."""

from __future__ import annotations

import inspect

import pytest

from baige_device.ops import OP_NAMES, contract
from baige_device.testing.cases import all_cases
from baige_device.testing.runner import Runner, open_backend
from tests.unit.testing.ignored import HINTS, IGNORED, ON_RANKS, Ignored, ignoring
from tests.unit.testing.mutants import broken_source

_SECOND_SET = {("sparse_attention", name) for name in ("extra_k", "extra_v", "extra_indices")}
"""Ignored together, by a mutant."""


@pytest.mark.parametrize("ignored", IGNORED, ids=[ignored.name for ignored in IGNORED])
def test_kit_notices(ignored: Ignored) -> None:
    backend, device = open_backend("broken", candidates=[broken_source(ignored.op, ignoring(ignored))])
    runner = Runner(backend, device, seed=13)
    cases = {case.id: case for case in all_cases([ignored.op])}
    passed = [name for name in ignored.cases if runner.run(cases[name]).status != "failed"]
    assert not passed, f"{ignored.op} ignores {ignored.parameter} and conforms in {passed}"


def test_every_parameter_is_ignored_once() -> None:
    optional = {
        (op, name)
        for op in OP_NAMES
        for name, parameter in inspect.signature(contract(op).signature).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    }
    assert optional <= {(ignored.op, ignored.parameter) for ignored in IGNORED} | HINTS | ON_RANKS | _SECOND_SET
