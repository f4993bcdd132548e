"""Whose platform a backend gets; needs no engine and no chip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baige_device.engines.chips import OWN_PLATFORM, defers, describe, gets_our_platform, worth_probing
from baige_device.registry.manager import BUILT_IN

EMULATOR = Path(__file__).resolve().parents[2] / "kunlun_emulator/site"


@pytest.mark.parametrize(
    ("backend", "ours"), [("reference", True), ("kunlun", True), ("cuda", False), ("acme", True), ("referense", True)]
)
def test_only_cuda_keeps_the_platform_of_the_engine(backend: str, ours: bool) -> None:
    assert gets_our_platform(backend) is ours
    assert set(BUILT_IN) - set(OWN_PLATFORM) == {"cuda"}


@pytest.mark.parametrize(
    ("asked", "found", "way"),
    [("auto", "acme", True), ("acme", "acme", False), ("reference", "reference", False), ("kunlun", "kunlun", True)],
)
def test_which_backends_give_way_to_another_platform(asked: str, found: str, way: bool) -> None:
    assert defers(asked, found) is way


def test_an_installed_runtime_is_worth_a_probe_and_is_not_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not worth_probing()
    monkeypatch.syspath_prepend(str(EMULATOR))
    assert worth_probing()
    assert "torch_xmlir" not in sys.modules


def test_neither_torch_nor_an_engine_is_imported() -> None:
    code = "import sys, baige_device.engines.chips; assert not {'torch', 'vllm', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_words_of_doctor() -> None:
    assert describe("here.Platform", []) == "baige-device (here.Platform)"
    assert describe(None, ["kunlun (vllm-kunlun)"]).startswith("kunlun (vllm-kunlun); baige-device mounts")
    assert describe(None, []).startswith("the engine's own; ")
