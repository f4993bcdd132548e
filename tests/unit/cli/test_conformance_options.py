"""`baige-device conformance`: options that cannot work end it before its work, with one line and status 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from baige_device.cli.app import app
from baige_device.cli.demo_model import default_cache_dir


def test_without_torch_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, ["conformance"])
    assert result.exit_code == 2
    assert result.stderr.startswith("conformance: needs torch, which cannot be imported: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.device_count() > 99, reason="this machine has the device")
def test_a_device_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["conformance", "--op", "kv_write", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert result.stderr.startswith("conformance: device: 'cuda:99' cannot be used here: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("report", ["/nonexistent/report.md", "/", "report.json"])
def test_a_report_that_cannot_be_written_is_refused(report: str) -> None:
    result = CliRunner().invoke(app, ["conformance", "--report", report], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"got {report}" in result.output


def test_the_demo_s_cache_without_a_home_directory_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BAIGE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FileNotFoundError, match=r"nowhere to cache it: .*Set BAIGE_CACHE or HOME"):
        default_cache_dir()
