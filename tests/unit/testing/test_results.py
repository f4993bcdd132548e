"""The kit demands the contract's result types: consumers read their fields by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baige_device.testing.cases import all_cases
from baige_device.testing.runner import Runner, open_backend
from tests.unit.testing.mutants import broken_source

_LISTS = [
    ("quantize_blocks", "fp8_e4m3-bfloat16"),
    ("attend_paged", "length-17"),
    ("sparse_attention", "gqa-half"),
    ("merge_attention", "bfloat16"),
]
_RECORDS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("hot_cache_resolve", "mid-life", tuple, "a ResolvePlan, got tuple"),
    (
        "hot_cache_resolve",
        "mid-life",
        lambda plan: SimpleNamespace(**plan._asdict()),
        "a ResolvePlan, got SimpleNamespace",
    ),
    (
        "moe_dispatch",
        "flat-tokens-2",
        lambda batch: SimpleNamespace(**vars(batch)),
        "an ExpertBatch, got SimpleNamespace",
    ),
    ("host_alloc", "bytes-1", lambda buffer: buffer.tensor, "a HostBuffer, got Tensor"),
]


def _reason(op: str, name: str, change: Callable[[Any], Any]) -> str:
    def mutation(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **rest: change(right(*args, **rest))

    backend, device = open_backend("broken", candidates=[broken_source(op, mutation)])
    case = next(case for case in all_cases([op]) if case.id == name)
    outcome = Runner(backend, device, seed=17).run(case)
    assert outcome.status == "failed"
    return outcome.reason


@pytest.mark.parametrize(("op", "name", "change", "told"), _RECORDS, ids=[told for *_, told in _RECORDS])
def test_a_record_of_another_type_is_refused(op: str, name: str, change: Callable[[Any], Any], told: str) -> None:
    assert f"result: expected {told}" in _reason(op, name, change)


@pytest.mark.parametrize(("op", "name"), _LISTS, ids=[op for op, _ in _LISTS])
def test_a_list_is_no_tuple(op: str, name: str) -> None:
    reason = _reason(op, name, list)
    assert "result: expected the tuple (" in reason
    assert "got list" in reason
