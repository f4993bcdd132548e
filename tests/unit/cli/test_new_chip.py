"""The scaffold of a new chip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from baige_device.cli.app import app
from baige_device.cli.new_chip import scaffold
from baige_device.registry.manager import load_backend
from tests.unit.registry.fakes import source


def test_scaffold_is_a_complete_distribution_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = scaffold("tally", tmp_path / "baige-tally")
    assert all(path.is_file() and "$" not in path.read_text() for path in files)
    project = (tmp_path / "baige-tally" / "pyproject.toml").read_text()
    assert '[project.entry-points."baige_device.backends"]\ntally = "baige_tally.plugin"\n' in project
    monkeypatch.syspath_prepend(str(tmp_path / "baige-tally"))
    monkeypatch.setenv("TALLY_SIMULATE", "1")
    from importlib import import_module

    backend = load_backend("tally", [source("tally", import_module("baige_tally.plugin"))])
    assert not backend.broken, backend.traceback
    probe = backend.probe()
    assert probe.present
    assert "simulated" in probe.reason
    write = backend.offers("kv_write", probe.device("tally"))[0].load()
    cache = torch.full((2, 2, 1, 3), 7.0)
    write(torch.ones(2, 1, 3), cache, torch.tensor([3, -1]))
    assert cache.flatten(0, 1)[:, 0, 0].tolist() == [7.0, 7.0, 7.0, 1.0]


def test_the_hardware_is_absent_unless_simulated(tmp_path: Path) -> None:
    scaffold("tally", tmp_path / "baige-tally")
    code = "import baige_tally.plugin as p; print(p.baige_hardware().ok, p.baige_probe().present)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "baige-tally",
        env={"PYTHONPATH": str(Path.cwd())},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("Tally", "a-z, 0-9"), ("cuda", "'cuda' is taken by built-in"), ("x", "2 to 31"), ("auto", "reserved")],
)
def test_bad_names_write_nothing(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaffold(name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_next_command_names_a_path_and_no_package_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["new-chip", "tally"])
    assert result.exit_code == 0
    assert "pip install ./baige-tally" in result.stdout


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    result = CliRunner().invoke(app, ["new-chip", "tally", "--dir", str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "which holds files" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
