"""Activation: once per process, same record everywhere: user-demand case A4."""

from __future__ import annotations

import logging
import multiprocessing

import pytest

import baige_device
from baige_device.errors import ActivationError, BaigeError, OpUnsupported, RankMismatch
from baige_device.record import compare_records
from baige_device.registry.offers import Need
from baige_device.settings import Settings
from tests.unit.registry.fakes import backend, offering, source, with_reference


def _child(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    queue.put(baige_device.activate().record.as_dict())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_activate_to_the_same_record(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=_child, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    records = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    compare_records([baige_device.activate().record.as_dict(), *records])


def test_second_activation_returns_the_first_and_refuses_other_settings() -> None:
    first = baige_device.activate()
    assert baige_device.activate() is first
    assert baige_device.current() is first
    with pytest.raises(ActivationError, match="active with checks='auto', and was asked for checks='values'"):
        baige_device.activate(Settings(checks="values"))


def test_switched_off_cannot_be_activated() -> None:
    with pytest.raises(ActivationError, match="backend=off"):
        baige_device.activate(Settings(backend="off"))
    with pytest.raises(ActivationError, match="not active"):
        baige_device.current()


def test_failed_activation_leaves_no_state() -> None:
    chip = with_reference(source("acme", backend()))
    with pytest.raises(OpUnsupported):
        baige_device.activate(Settings(backend="acme"), needs=[Need("kv_write", "layer 0")], candidates=chip)
    with pytest.raises(ActivationError):
        baige_device.current()


def test_the_record_is_one_log_line_and_fallbacks_are_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    chip = with_reference(source("acme", backend(offers={"kv_write": offering(print)})))
    with caplog.at_level(logging.INFO, "baige_device"):
        active = baige_device.activate(Settings(backend="acme", fallback="reference"), candidates=chip, engine="vllm 1")
        baige_device.activate(Settings(backend="acme", fallback="reference"), candidates=chip)
    lines = [record for record in caplog.records if "baige-device active" in record.message]
    assert len(lines) == 1
    assert "backend acme" in lines[0].message
    assert "engine vllm 1" in lines[0].message
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(active.record.fallbacks) == 14


def test_needs_known_later_are_checked_against_what_is_bound() -> None:
    def refuse(need: Need) -> str:
        return "no head size 192" if need.params.get("head_size") == 192 else ""

    def attend_paged(*args: object, **options: object) -> None:
        return None

    chip = with_reference(source("acme", backend(offers={"attend_paged": offering(attend_paged, refuses=refuse)})))
    active = baige_device.activate(Settings(backend="acme"), candidates=chip)
    active.require(Need("attend_paged", "layer 1", {"head_size": 128}))
    with pytest.raises(
        OpUnsupported, match=r"tuned: no head size 192 \[asked by attend_paged\(head_size=192\) for layer 1\]"
    ):
        active.require(Need("attend_paged", "layer 1", {"head_size": 192}))
    with pytest.raises(OpUnsupported, match="acme offers no kv_write"):
        active.require(Need("kv_write", "layer 1"))


def test_ranks_that_differ_are_named_with_the_first_difference() -> None:
    record = baige_device.activate().record.as_dict()
    other = {**record, "ops": {**record["ops"], "kv_write": {**record["ops"]["kv_write"], "tier": "tuned"}}}
    compare_records([record, record])
    with pytest.raises(RankMismatch, match=r"ops\.kv_write\.tier: rank 0 has 'reference', rank 2 has 'tuned'"):
        compare_records([record, record, other])


def test_all_errors_share_a_base() -> None:
    from baige_device import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), BaigeError)
