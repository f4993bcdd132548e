"""The Kunlun backend on the emulator, through the kit that ships to vendors, under the chip's rules.

An implementation runs once, not once a vendor profile: the newest profile runs whole, the others where they choose
something else, and a test checks that no profile chooses an implementation that did not run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import ClassVar

import kunlun_emulator
import pytest

from baige_device.registry.resolve import resolve
from baige_device.testing import BackendConformance, all_cases, open_backend
from tests.unit.kunlun.conftest import forget
from tests.unit.kunlun.strict import strict_kit

_KNOWN_REFUSALS = (
    "Kunlun has no float8",
    "bf16 weights need no quantisation",
    "the kernels take bfloat16 or float16",
    "the kernels have no soft cap",
    "a window without causality has no kernel",
    "it reads lengths or a plan on the host",
    "whether this transfer can be captured is open",
    "whether a BKCL collective can be captured is open",
    "no caller captures the sparse kernels",
    "it reports NaN by a sync",
    "only the masked layout on one rank has fixed shapes",
    "the installed vendor build lacks",
    "the indexer kernels take 128 columns",
    "which takes k = 2048",
    "are not among the proven sizes",
)
"""Every reason for which a case may be refused; docs/kunlun.md explains each."""


@pytest.fixture(scope="class")
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """The class's vendor profile, for all its cases."""
    with kunlun_emulator.installed(request.cls.profile):
        forget()
        with strict_kit() if request.cls.strict else contextlib.nullcontext():
            yield
    forget()


@pytest.mark.usefixtures("emulated")
class _OnEmulator(BackendConformance):
    backend = "kunlun"
    seed = 20261129  # CI must say the same twice; `baige-device conformance` draws a fresh one
    profile: ClassVar[str]
    strict: ClassVar[bool] = True


class TestTorch29(_OnEmulator):
    profile = "torch2.9"
    skip: ClassVar[dict[str, str]] = {"hot_cache_resolve/walk-*": "many calls; run in TestWalks, without the rules"}


class TestWalks(_OnEmulator):
    """Long sequences of calls on one state."""

    profile = "torch2.9"
    strict = False
    ops = ("hot_cache_resolve",)


class TestTorch25(_OnEmulator):
    """An older build: no batch_memcpy, so rows move through the page transfer. Its other ops are those of torch2.9."""

    profile = "torch2.5"
    ops = ("uva_sparse_gather", "uva_sparse_scatter")


class TestPortable(_OnEmulator):
    """The portable implementations, which a bare build runs with and a full build would not choose."""

    profile = "torch2.9"
    tier = "portable"
    ops = (
        "uva_sparse_gather",
        "uva_sparse_scatter",
        "sparse_attention",
        "merge_attention",
        "index_topk",
        "kv_write",
    )


class TestRanks:
    """The collective ops on two and three ranks, each rank with its own emulator, found on the Python path."""

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_ranks(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from kunlun_emulator.install import SITE

        from baige_device.testing import RankOptions, run_ranks

        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.syspath_prepend(str(SITE))
        outcomes = run_ranks(RankOptions("kunlun", ranks, seed=11))
        failed = [f"{item.op}/{item.case}: {item.reason}" for item in outcomes if item.status == "failed"]
        assert not failed, "\n".join(failed[:5])
        assert sum(item.status == "passed" for item in outcomes) > len(outcomes) // 2


@pytest.mark.parametrize("chip", list(kunlun_emulator.PROFILES), indirect=True)
def test_every_refusal_has_a_documented_reason(chip: kunlun_emulator.STATE.__class__) -> None:
    backend, device = open_backend("kunlun")
    for case in all_cases():
        try:
            resolve(backend, device, case.needs())
        except Exception as error:
            text = str(error)
            assert any(reason in text for reason in _KNOWN_REFUSALS), text


def _choices(profile: str) -> dict[str, set[str]]:
    """Op -> the implementations that a profile chooses, over all cases of the kit."""
    with kunlun_emulator.installed(profile):
        forget()
        backend, device = open_backend("kunlun")
        chosen: dict[str, set[str]] = {}
        for case in all_cases():
            for offer in backend.offers(case.op, device):
                if offer.available and all(offer.supports(need) for need in case.needs() if need.op == case.op):
                    chosen.setdefault(case.op, set()).add(offer.label)
                    break
    forget()
    return chosen


def test_no_profile_chooses_what_did_not_run() -> None:
    ran = _choices("torch2.9")
    for op, labels in _choices("torch2.5").items():
        assert op in TestTorch25.ops or labels == ran[op]
        ran[op] |= labels
    with kunlun_emulator.installed("torch2.9"):
        forget()
        backend, device = open_backend("kunlun")
        for op in TestPortable.ops:
            ran[op] |= {offer.label for offer in backend.offers(op, device) if offer.tier.label == "portable"}
    for profile in kunlun_emulator.PROFILES:
        for op, labels in _choices(profile).items():
            assert labels <= ran[op], f"{profile}: {op}"
