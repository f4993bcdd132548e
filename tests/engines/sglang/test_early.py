"""The .pth file: it costs nothing where it is not asked for, and a Python start never depends on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.sglang.engine import ROOT, environment

LINE = (ROOT / "baige_device_sglang.pth").read_text()
SHOW = "import sys; print(sorted(name for name in sys.modules if name.split('.')[0] in ('baige_device', 'torch')))"


def start(**settings: str) -> str:
    """Modules of ours and torch after an interpreter start in this (installed) environment."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment(settings), capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("backend", ["off", "auto", "cuda", "acme"])
def test_it_is_inert_for_other_backends(backend: str) -> None:
    assert start(BAIGE_BACKEND=backend) == "[]"


def test_reference_installs_import_finders_and_imports_no_torch() -> None:
    modules = ["baige_device", "baige_device._version"]
    modules += ["baige_device.engines", "baige_device.engines.sglang", "baige_device.engines.sglang.early"]
    assert start(BAIGE_BACKEND="reference") == str(modules)


def test_a_missing_package_does_not_stop_python(tmp_path: Path) -> None:
    (tmp_path / "left_behind.pth").write_text(LINE.replace("baige_device.", "no_such_package."))
    done = subprocess.run(
        [sys.executable, "-c", f"import site; site.addsitedir({str(tmp_path)!r}); print('started')"],
        env=environment({"BAIGE_BACKEND": "reference"}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "started\n"
    assert "no_such_package" in done.stderr


def test_installing_again_after_a_finder_has_done_its_work_brings_it_not_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from baige_device.engines.sglang import early

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(early, "_placed", set())
    early.install()
    sys.meta_path.remove(early._SglangFinder)
    early.install()
    assert early._SglangFinder not in sys.meta_path
    assert sys.meta_path.count(early._TorchvisionFinder) == 1
