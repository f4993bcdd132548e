"""Discovery: each backend is loaded apart, and mistakes in a plugin are named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baige_device.errors import BackendError
from baige_device.registry import hookspecs
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.manager import BUILT_IN, Source, discover, load_backend, sources
from baige_device.registry.offers import DeviceInfo, Offer
from tests.unit.registry.fakes import backend, offering, source, with_reference


def test_built_ins_are_found_without_an_installation() -> None:
    assert [item.name for item in sources(entry_points=())] == list(BUILT_IN)


def test_broken_backend_is_listed_with_traceback_and_hides_nobody() -> None:
    found = {item.name: item for item in discover(with_reference(source("bad", ImportError("libfoo.so"))))}
    assert not found["reference"].broken
    assert found["bad"].broken
    assert "libfoo.so" in found["bad"].traceback
    assert "Traceback" in found["bad"].traceback


def test_unknown_name_lists_the_known_and_the_near_match() -> None:
    with pytest.raises(BackendError, match=r"reference.*got 'referense' \(did you mean 'reference'\?\)"):
        load_backend("referense", with_reference())


def test_misspelt_hook_names_the_near_match() -> None:
    plugin = backend()
    plugin.kv_writes = hookimpl(lambda device: None)
    found = load_backend("acme", [source("acme", plugin)])
    assert isinstance(found.error, BackendError)
    assert "did you mean 'kv_write'?" in str(found.error)


def test_default_argument_in_a_hookimpl_is_an_error() -> None:
    @hookimpl
    def kv_write(device: DeviceInfo | None = None) -> Offer | None:
        return None

    plugin = backend()
    plugin.kv_write = kv_write
    found = load_backend("acme", [source("acme", plugin)])
    assert "argument 'device' has a default value" in str(found.error)


def test_plugin_without_a_probe_is_an_error() -> None:
    found = load_backend("acme", [source("acme", SimpleNamespace())])
    assert "baige_probe" in str(found.error)


def test_a_hook_that_answers_nothing_or_something_else_is_named() -> None:
    plugin = backend()
    plugin.kv_write = hookimpl(lambda device: print)
    plugin.baige_probe = hookimpl(lambda: None)
    found = load_backend("acme", [source("acme", plugin)])
    with pytest.raises(BackendError, match="'acme': baige_probe: expected a Probe, got None"):
        found.probe()
    with pytest.raises(BackendError, match=r"'acme': hook kv_write: expected Offer\(s\) or None, got <built-in"):
        found.offers("kv_write", DeviceInfo("acme", "cpu", "acme"))


def test_two_distributions_with_one_name_are_an_error_that_names_both() -> None:
    found = discover([source("acme", backend(), "acme-a 1.0"), source("acme", backend(), "acme-b 2.0")])
    assert len(found) == 1
    assert "acme-a 1.0 and acme-b 2.0" in str(found[0].error)


def test_offers_come_best_tier_first_and_wrong_answers_are_named() -> None:
    from baige_device.registry.offers import Tier

    both = [offering("m:portable", Tier.PORTABLE), offering("m:tuned", Tier.TUNED)]
    found = load_backend("acme", [source("acme", backend(offers={"kv_write": both}))])
    device = DeviceInfo("acme", "cpu", "acme")
    assert [offer.label for offer in found.offers("kv_write", device)] == ["m:tuned", "m:portable"]
    assert found.offers("attend_paged", device) == []
    wrong = load_backend("acme", [source("acme", backend(offers={"kv_write": ["no offer"]}))])  # type: ignore[dict-item]
    with pytest.raises(BackendError, match="hook kv_write: expected Offer"):
        wrong.offers("kv_write", device)


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)])
def test_an_exception_of_an_op_hook_is_named_with_backend_op_and_cause(error: BaseException) -> None:
    @hookimpl
    def kv_write(device: DeviceInfo) -> Offer:
        raise error

    plugin = backend()
    plugin.kv_write = kv_write
    found = load_backend("acme", [source("acme", plugin)])
    with pytest.raises(
        BackendError,
        match=rf"kv_write: backend 'acme' \(fake-dist 1\.0\): hook kv_write raises {type(error).__name__}: ",
    ) as caught:
        found.offers("kv_write", DeviceInfo("acme", "cpu", "acme"))
    assert caught.value.__cause__ is error


def test_a_plugin_that_exits_is_broken_and_does_not_end_the_process() -> None:
    def load() -> object:
        raise SystemExit(3)

    found = load_backend("acme", [Source("acme", "fake-dist 1.0", load)])
    assert isinstance(found.error, SystemExit)
    assert "SystemExit: 3" in found.traceback


def test_every_hook_is_documented_and_no_hook_is_unknown() -> None:
    from baige_device.ops import OP_NAMES

    specs = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "baige_device_spec")}
    assert set(specs) == {"baige_hardware", "baige_probe", "baige_findings", *OP_NAMES}
    assert all((spec.__doc__ or "").strip() for spec in specs.values())
