"""The probe looks at device nodes and torch_xmlir, and at nothing that an impersonation could fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kunlun_emulator
import pytest
import torch
from kunlun_emulator.install import SITE

from baige_device.backends.kunlun import probe
from baige_device.registry.choice import choose, survey

_ROOT = Path(__file__).resolve().parents[3]


def _nodes(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "ok", "reason"),
    [
        ((), False, "no Kunlun device node"),
        (("xpuctrl",), False, "no Kunlun device node"),
        (("xpu3", "xpu10"), False, "without"),
        (("xpu3", "xpu10", "xpuctrl"), True, "xpu3, xpu10"),
        (("xpuctrl", "xpulog", "xpu"), False, "no Kunlun device node"),
    ],
)
def test_hardware_is_device_nodes(tmp_path: Path, names: tuple[str, ...], ok: bool, reason: str) -> None:
    verdict = probe.hardware(_nodes(tmp_path, *names))
    assert verdict.ok is ok
    assert reason in verdict.reason


def test_nodes_sort_by_number(tmp_path: Path) -> None:
    assert probe.device_nodes(_nodes(tmp_path, "xpu10", "xpu2", "xpuctrl")) == ["xpu2", "xpu10"]


def test_without_torch_xmlir_the_chip_is_absent(tmp_path: Path) -> None:
    found = probe.probe(_nodes(tmp_path, "xpu0", "xpuctrl"))
    assert not found.present
    assert "torch_xmlir is not installed" in found.reason


def test_an_absent_chip_costs_no_torch_import() -> None:
    code = "import sys; from baige_device.backends.kunlun import probe; probe.probe(); print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_software_without_a_card_is_no_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chip: kunlun_emulator.STATE.__class__
) -> None:
    import torch_xmlir

    monkeypatch.setattr(torch_xmlir, "__emulator__", False)
    found = probe.probe(tmp_path)
    assert not found.present
    assert "no Kunlun device node" in found.reason
    found = probe.probe(_nodes(tmp_path, "xpu0", "xpuctrl"))
    assert found.present
    assert found.torch_device == "cuda"
    assert found.facts["device_nodes"] == ("xpu0",)


def test_names_and_capabilities_are_never_asked(
    monkeypatch: pytest.MonkeyPatch, chip: kunlun_emulator.STATE.__class__
) -> None:
    def refuse(*args: object) -> object:
        raise AssertionError("the probe asked torch.cuda about identity")

    for name in ("is_available", "get_device_name", "get_device_capability", "device_count"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert choose("kunlun").device.name == probe.EMULATED_NAME


def test_the_emulator_is_never_hardware(chip: kunlun_emulator.STATE.__class__) -> None:
    item = next(item for item in survey() if item.backend.name == "kunlun")
    assert item.probe is not None
    assert item.probe.device_name == "Kunlun emulator"
    assert item.probe.facts["emulated"] is True
    assert item.hardware is Path("/dev/xpuctrl").exists()


def test_emulator_by_python_path_in_a_fresh_process() -> None:
    code = (
        "import baige_device; a = baige_device.activate(); "
        "print(a.record.backend, '|', a.record.device, '|', a.ops.serves('kv_write'))"
    )
    path = os.pathsep.join([str(SITE), str(_ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "KUNLUN_EMULATOR_PROFILE": "torch2.5", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "kunlun | Kunlun emulator | True"
