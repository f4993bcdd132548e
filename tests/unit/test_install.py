"""The wheel in a clean environment: no torch, no engine, no extras but kunlun's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("install")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    wheel = next(folder.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", f"{wheel}[kunlun]"]
    subprocess.run(install, check=True, capture_output=True)
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], cwd=python.parent, capture_output=True, text=True, check=False)


def test_import_brings_no_torch(clean_python: Path) -> None:
    done = run(clean_python, "-c", "import baige_device, sys; print(baige_device.__version__, 'torch' in sys.modules)")
    assert done.stdout.split()[1] == "False", done.stderr


def test_doctor_runs_and_names_what_is_missing(clean_python: Path) -> None:
    done = run(clean_python, "-m", "baige_device.cli", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert any("torch is not installed" in note for note in found["notes"])
    reasons = {item["name"]: item["reason"] for item in found["backends"]}
    assert "torch_xmlir is not installed" in reasons["kunlun"]


def test_asking_for_a_backend_without_torch_is_a_problem(clean_python: Path) -> None:
    done = subprocess.run(
        [clean_python, "-m", "baige_device.cli", "doctor", "--json"],
        env={"BAIGE_BACKEND": "reference"},
        cwd=clean_python.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "torch is not installed" in json.loads(done.stdout)["problems"][0]


def test_the_wheel_carries_its_data(clean_python: Path) -> None:
    done = run(clean_python, "-m", "baige_device.cli", "new-chip", "tally", "--dir", "baige-tally")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clean_python.parent / "baige-tally" / "baige_tally" / "kv_write.py").is_file()
    listing = (
        "from importlib.resources import files; print(*files('baige_device.backends.cuda').joinpath('csrc').iterdir())"
    )
    assert ".cu" in run(clean_python, "-c", listing).stdout
