"""One choice per op: user-demand case A6 (no silent fall back)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baige_device.errors import BackendError, ContractError, OpUnsupported
from baige_device.ops import OP_NAMES
from baige_device.registry.manager import Backend, load_backend
from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict
from baige_device.registry.resolve import resolve
from baige_device.registry.table import OpTable
from tests.unit.registry.fakes import backend, offering, source, with_reference

DEVICE = DeviceInfo("acme", "cpu", "acme")
REFERENCE = load_backend("reference", with_reference())


def acme(**offers: Any) -> Backend:
    return load_backend("acme", [source("acme", backend(offers=offers))])


def no_192(need: Need) -> str:
    return "head_size 192 is not built" if need.params.get("head_size") == 192 else ""


def test_highest_tier_that_serves_all_needs_wins() -> None:
    tuned, portable = offering("m:tuned", refuses=no_192), offering("m:portable", Tier.PORTABLE)
    chip = acme(attend_paged=[tuned, portable])
    small, large = (Need("attend_paged", "layer 0", {"head_size": size}) for size in (128, 192))
    assert resolve(chip, DEVICE, [small])["attend_paged"].chosen.offer is tuned  # type: ignore[union-attr]
    found = resolve(chip, DEVICE, [small, large])["attend_paged"]
    assert found.chosen is not None
    assert found.chosen.offer is portable
    assert "head_size 192 is not built" in found.candidates[0].refusal


def test_a_need_that_nothing_serves_is_refused_with_every_reason() -> None:
    chip = acme(attend_paged=offering("m:tuned", refuses=no_192))
    with pytest.raises(OpUnsupported, match=r"attend_paged: backend 'acme'.*head_size 192 is not built.*for layer 3"):
        resolve(chip, DEVICE, [Need("attend_paged", "layer 3", {"head_size": 192})])


def test_an_op_nobody_needs_may_be_absent_and_says_so_when_called() -> None:
    table = OpTable("acme", resolve(acme(), DEVICE))
    assert not table.serves("kv_write")
    with pytest.raises(OpUnsupported, match="acme offers no kv_write"):
        table.kv_write()


def test_no_fall_back_unless_allowed() -> None:
    need = [Need("kv_write", "layer 0")]
    with pytest.raises(OpUnsupported):
        resolve(acme(), DEVICE, need, reference=REFERENCE)
    found = resolve(acme(), DEVICE, need, reference=REFERENCE, allow_fallback=True)["kv_write"]
    assert found.fell_back
    assert found.chosen is not None
    assert found.chosen.backend == "reference"
    assert "acme offers none" in found.reason


def test_a_choice_forces_a_tier_or_leaves_the_op_to_the_host() -> None:
    chip = acme(kv_write=[offering("m:tuned"), offering("m:portable", Tier.PORTABLE)])
    forced = resolve(chip, DEVICE, choices={"kv_write": "portable"})["kv_write"]
    assert forced.chosen is not None
    assert forced.chosen.offer.tier is Tier.PORTABLE
    assert resolve(chip, DEVICE, choices={"kv_write": "off"})["kv_write"].chosen is None
    by_hand = resolve(chip, DEVICE, choices={"kv_write": "reference"}, reference=REFERENCE)["kv_write"]
    assert by_hand.chosen is not None
    assert by_hand.chosen.backend == "reference"
    with pytest.raises(OpUnsupported, match="BAIGE_OPS=merge_attention=tuned"):
        resolve(chip, DEVICE, choices={"merge_attention": "tuned"})


def test_unavailable_offer_keeps_its_reason() -> None:
    lacking = Offer("m:f", Tier.TUNED, available=Verdict.no("the vendor library lacks symbol f"))
    found = resolve(acme(kv_write=lacking), DEVICE)["kv_write"]
    assert found.chosen is None
    assert "lacks symbol f" in found.reason


def test_an_exception_of_supports_is_named_with_backend_op_and_need() -> None:
    def supports(need: Need) -> Verdict:
        raise KeyError("head_size")

    chip = acme(kv_write=Offer("m:f", Tier.TUNED, supports))
    with pytest.raises(
        BackendError,
        match=r"kv_write: backend 'acme': supports\(\) of m:f raises KeyError: 'head_size' \[asked by .*layer 0",
    ) as caught:
        resolve(chip, DEVICE, [Need("kv_write", "layer 0")])
    assert isinstance(caught.value.__cause__, KeyError)
    wrong = acme(kv_write=Offer("m:f", Tier.TUNED, lambda need: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(BackendError, match="expected a Verdict, got None"):
        resolve(wrong, DEVICE, [Need("kv_write", "layer 0")])


def test_a_broken_reference_is_no_fall_back() -> None:
    twice = load_backend("reference", [source("reference", backend()), source("reference", backend())])
    with pytest.raises(BackendError, match="the fall back cannot be loaded: two backends are named 'reference'"):
        resolve(acme(), DEVICE, reference=twice, allow_fallback=True)


def test_unknown_op_in_a_need_is_an_error() -> None:
    with pytest.raises(KeyError, match="unknown op 'kv_wriet'"):
        resolve(acme(), DEVICE, [Need("kv_wriet", "layer 0")])


def test_an_exception_in_a_kernel_propagates_and_is_never_retried() -> None:
    calls = []

    def kernel(values: object, cache: object, slots: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device lost")

    found = resolve(acme(kv_write=offering(kernel)), DEVICE, reference=REFERENCE, allow_fallback=True)
    table = OpTable("acme", found, checks="none")
    table.kv_write(1, 2, 3)
    table.kv_write(1, 2, 3)
    with pytest.raises(RuntimeError, match="device lost"):
        table.kv_write(1, 2, 3)
    assert len(calls) == 3
    assert table.calls() == {**table.calls(), "kv_write": 3}


def test_the_table_is_frozen_and_complete() -> None:
    table = OpTable("reference", resolve(REFERENCE, DeviceInfo("reference", "cpu", "cpu")))
    assert set(table.calls()) == set(OP_NAMES)
    with pytest.raises(AttributeError, match="frozen"):
        table.kv_write = None
    with pytest.raises(AttributeError, match="no op 'nonsense'"):
        table.nonsense()
    with pytest.raises(KeyError):
        table.serves("nonsense")


@pytest.mark.parametrize(("tier", "refused"), [(Tier.REFERENCE, True), (Tier.PORTABLE, False), (Tier.TUNED, False)])
def test_automatic_checks_guard_the_reference_and_leave_kernels_bare(tier: Tier, refused: bool) -> None:
    table = OpTable("acme", resolve(acme(kv_write=offering(lambda values, cache, slots: "ran", tier)), DEVICE))
    bad = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    if refused:
        with pytest.raises(ContractError, match=r"kv_write: values\.shape"):
            table.kv_write(*bad)
    else:
        assert table.kv_write(*bad) == "ran"
