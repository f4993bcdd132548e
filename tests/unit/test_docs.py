"""What must exist for every op, and reference pages that follow the code."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from baige_device.cli.diagnosis import Diagnosis
from baige_device.ops import OP_NAMES, contract
from baige_device.testing.report import OpSummary, make_report

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("op", OP_NAMES)
def test_every_op_has_contract_reference_mathematics_and_documentation(op: str) -> None:
    folder = ROOT / "baige_device" / "ops" / op
    for name in ("contract.py", "reference.py", "README.md"):
        assert (folder / name).is_file(), f"{op} lacks {name}"
    described = contract(op)
    assert described.name == op
    text = described.signature.__doc__ or ""
    for word in ("Args:", "Raises:", "Cost:"):
        assert word in text, f"{op}: docstring lacks {word}"


def test_reference_pages_are_current() -> None:
    found = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_key_of_the_json_formats_is_documented() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    report = make_report([], backend="b", origin="o", device="d", tier="", seed=0, ranks=1)
    op = OpSummary("kv_write", ())
    for key in (*(field.name for field in dataclasses.fields(Diagnosis)), *report.as_dict(), *op.as_dict()):
        assert f'"{key}": ' in page, f"docs/json.md lacks {key}"


def test_both_readmes_give_the_same_commands() -> None:
    def commands(name: str) -> list[str]:
        lines = (ROOT / name).read_text().splitlines()
        return [line.split("#")[0].strip() for line in lines if line.startswith(("make ", "pip ", "baige-device "))]

    assert commands("README.md") == commands("README.zh.md")
    assert "make test" in commands("README.md")
    assert "make test" in (ROOT / ".ci" / "run").read_text()
