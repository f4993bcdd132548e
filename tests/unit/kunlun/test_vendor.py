"""Loading the vendor's modules: missing ops, missing modules, and native libraries that do not load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import kunlun_emulator
import pytest
import torch

from baige_device.backends.kunlun import vendor
from baige_device.errors import BaigeError
from baige_device.registry.choice import choose
from baige_device.registry.resolve import resolve
from tests.unit.kunlun.conftest import forget

_SYMBOL = "/usr/lib/vendor/libkunlun_ops.so: undefined symbol: _ZN5baidu3xpu3api13moe_fc_fusionEv"


def _broken(message: str) -> kunlun_emulator.Profile:
    return replace(kunlun_emulator.PROFILES["torch2.9"], broken=(("kunlun_ops", message),))


def _wheel(folder: Path, version: str, *requires: str) -> None:
    info = folder / f"kunlun_ops-{version}.dist-info"
    info.mkdir()
    lines = [f"Metadata-Version: 2.1\nName: kunlun_ops\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp310-cp310-linux_x86_64\n")


@pytest.mark.parametrize(
    ("version", "requires", "built_for"),
    [
        ("0.1.58", ("torch==2.5.1",), "torch==2.5.1, cp310 (kunlun_ops 0.1.58)"),
        ("1.3.0+torch29", (), "torch 2.9, cp310 (kunlun_ops 1.3.0+torch29)"),
        ("0.0.1", (), "cp310 (kunlun_ops 0.0.1)"),
    ],
)
def test_undefined_symbol_names_library_symbol_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, requires: tuple[str, ...], built_for: str
) -> None:
    _wheel(tmp_path, version, *requires)
    monkeypatch.syspath_prepend(str(tmp_path))
    with kunlun_emulator.installed(_broken(_SYMBOL)):
        forget()
        with pytest.raises(vendor.VendorLibraryError) as caught:
            vendor.kernel_module()
    text = str(caught.value)
    for part in (
        "library /usr/lib/vendor/libkunlun_ops.so",
        "undefined symbol _ZN5baidu3xpu3api13moe_fc_fusionEv",
        f"built for {built_for}",
        f"found torch {torch.__version__}",
    ):
        assert part in text


def test_other_load_errors_keep_their_message() -> None:
    with kunlun_emulator.installed(_broken("libxpuapi.so: cannot open shared object file")):
        forget()
        with pytest.raises(vendor.VendorLibraryError, match=r"libxpuapi.so: cannot open .* built for an unknown torch"):
            vendor.kernel_module()


def test_a_broken_library_stops_activation_with_its_cause() -> None:
    with kunlun_emulator.installed(_broken(_SYMBOL)):
        forget()
        chosen = choose("kunlun")
        with pytest.raises(BaigeError, match="undefined symbol"):
            resolve(chosen.backend, chosen.device)


def test_missing_ops_are_reasons(chip: kunlun_emulator.STATE.__class__) -> None:
    verdict = vendor.require(["kunlun_ops.quant2d", "kunlun_ops.nope", "xspeedgate_ops.neither"])
    assert verdict.reason == "the installed vendor build lacks kunlun_ops.nope, xspeedgate_ops.neither"


@pytest.mark.parametrize("chip", ["legacy"], indirect=True)
def test_the_old_module_name_is_found(chip: kunlun_emulator.STATE.__class__) -> None:
    assert vendor.kernel_module().__name__ == "xtorch_ops"
    assert vendor.has("kunlun_ops.quant2d")


@pytest.mark.parametrize("chip", ["bare"], indirect=True)
def test_missing_modules_are_reasons_too(chip: kunlun_emulator.STATE.__class__) -> None:
    assert not vendor.has("kunlun_ops.quant2d")
    assert not vendor.has("xspeedgate_ops.topk_per_row")
