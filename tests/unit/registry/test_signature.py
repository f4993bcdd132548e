"""What is loaded must be importable, callable and take the contract's arguments: seen at activation, not in a call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from baige_device.errors import BackendError
from baige_device.ops import OP_NAMES, contract
from baige_device.registry.offers import Offer, Tier
from baige_device.registry.resolve import Candidate
from baige_device.registry.signature import mismatch
from baige_device.registry.table import load_target

SPARSE = contract("sparse_attention")


def outdated(
    q: Any,
    k_rows: Any,
    v_rows: Any,
    indices: Any,
    *,
    scale: float,
    v_dim: int = 0,
    kv_format: str = "plain",
    extra_k: Any = None,
    extra_v: Any = None,
    extra_indices: Any = None,
    out: Any = None,
    lse: Any = None,
) -> None:
    """`sparse_attention` as it was before `reserved_sms`."""


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return wrapper


def load(function: object, op: str = "sparse_attention") -> Callable[..., Any]:
    return load_target(op, Candidate("acme", Offer(function, Tier.TUNED), ""))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [outdated, passing_on(outdated), functools.partial(outdated)])
def test_an_outdated_signature_names_op_target_argument_and_contract(function: Callable[..., Any]) -> None:
    with pytest.raises(BackendError) as caught:
        load(function)
    text = str(caught.value)
    assert text.startswith("sparse_attention: backend 'acme' offers ")
    assert "lacks reserved_sms: every call passes all of sparse_attention(q, k_rows, v_rows, indices, *, scale" in text
    assert text.endswith("reserved_sms=0)")


@pytest.mark.parametrize("op", OP_NAMES)
def test_the_contract_and_anything_that_takes_all_fit(op: str) -> None:
    def anything(*args: Any, **options: Any) -> None:
        return None

    described = contract(op)
    assert mismatch(described, described.signature) == ""
    assert mismatch(described, anything) == ""
    assert mismatch(described, passing_on(described.signature)) == ""


def test_an_adapter_is_judged_by_its_own_arguments() -> None:
    @functools.wraps(outdated)
    def adapter(*args: Any, reserved_sms: int = 0, **options: Any) -> None:
        outdated(*args, **options)

    assert mismatch(SPARSE, adapter) == ""


def test_places_are_counted_and_arguments_of_its_own_need_defaults() -> None:
    kv_write = contract("kv_write")
    assert mismatch(kv_write, lambda rows, pool, where: None) == ""
    assert mismatch(kv_write, lambda values, cache, slots, stream=None: None) == ""
    assert mismatch(kv_write, lambda values, cache: None).startswith("lacks slots: ")
    assert "missing a required argument: 'stream'" in mismatch(kv_write, lambda values, cache, slots, stream: None)


def test_a_signature_that_cannot_be_read_is_let_through() -> None:
    def from_c() -> None:
        return None

    from_c.__signature__ = "none"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        inspect.signature(from_c)
    assert mismatch(SPARSE, from_c) == ""


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), ImportError("libfoo.so")])
def test_a_target_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(name: str) -> Any:
        raise error

    module = ModuleType("baige_test_target")
    module.__getattr__ = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "baige_test_target", module)
    with pytest.raises(
        BackendError, match=rf"offers baige_test_target:f, which cannot be loaded: {type(error).__name__}"
    ) as caught:
        load("baige_test_target:f")
    assert caught.value.__cause__ is error


def test_a_target_that_is_no_callable_is_named() -> None:
    with pytest.raises(BackendError, match="offers sys:path: expected a callable, got "):
        load("sys:path")
