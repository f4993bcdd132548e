"""The command and its report: JSON form, exit status, Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from baige_device.cli.conformance import conformance
from baige_device.testing.report import make_report
from baige_device.testing.runner import Outcome

PLUGIN = "tests.unit.testing.plugins:partial_backend"


def _run(*args: str) -> Result:
    app = typer.Typer()
    app.command()(conformance)
    return CliRunner().invoke(app, list(args))


def _json(result: Result) -> dict[str, object]:
    return dict(json.loads(result.stdout[result.stdout.index("{") :]))


def test_json_of_a_conforming_backend() -> None:
    result = _run("--op", "merge_attention", "--seed", "7", "--json")
    found = _json(result)
    assert result.exit_code == 0, result.output
    assert found["backend"] == "reference"
    assert found["seed"] == 7
    op = found["ops"]["merge_attention"]  # type: ignore[index]
    assert op["offered"] is True
    assert op["passed"] > 20
    assert op["failed"] == 0
    assert op["refused"] == []
    assert 0 < op["worst_error"] < 1e-2
    assert op["tiers"] == {"reference": op["passed"]}


def test_refused_and_absent_are_not_passed() -> None:
    result = _run(
        "--backend",
        "acme",
        "--plugin",
        PLUGIN,
        "--op",
        "attend_paged",
        "--op",
        "kv_write",
        "--op",
        "host_alloc",
        "--json",
    )
    ops = _json(result)["ops"]
    assert result.exit_code == 0, result.output
    assert ops["host_alloc"]["offered"] is False  # type: ignore[index]
    assert ops["host_alloc"]["passed"] == 0  # type: ignore[index]
    assert ops["kv_write"]["passed"] == 0  # type: ignore[index]
    refused = ops["attend_paged"]["refused"]  # type: ignore[index]
    assert {"case", "reason"} == set(refused[0])
    forbidden = _run("--backend", "acme", "--plugin", PLUGIN, "--op", "attend_paged", "--forbid-refused")
    assert forbidden.exit_code == 1


def test_a_failure_exits_with_1_and_nothing_tested_too() -> None:
    failing = _run("--backend", "acme", "--plugin", PLUGIN, "--op", "index_topk")
    assert failing.exit_code == 1
    assert "failed: index_topk/" in failing.stdout
    assert "acme does not conform" in failing.stdout
    absent = _run("--backend", "acme", "--plugin", PLUGIN, "--op", "host_alloc")
    assert absent.exit_code == 1
    assert "acme was not tested" in absent.stdout


def test_unknown_names_exit_with_2() -> None:
    assert _run("--backend", "no-such-chip").exit_code == 2
    assert _run("--op", "no_such_op").exit_code == 2
    assert _run("--tier", "fast").exit_code == 2


def test_report_files(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    result = _run("--op", "kv_write", "--op", "host_alloc", "--measure", "--report", str(path))
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert text.startswith("# Conformance of `reference` on cpu (reference)")
    assert "| kv_write | reference |" in text
    assert "## Skipped" in text
    assert "large: not asked for" in text
    found = json.loads(path.with_suffix(".json").read_text())
    assert [item["op"] for item in found["measurements"]] == ["kv_write"]
    assert found["measurements"][0]["percent"] > 0
    assert {"baige-device", "python", "torch"} <= set(found["versions"])


def test_an_infinite_error_stays_valid_json() -> None:
    outcomes = [Outcome("kv_write", "a", "failed", "tuned", "broken | badly", float("inf"))]
    report = make_report(outcomes, backend="x", origin="o", device="d", tier="", seed=1, ranks=1)
    assert json.loads(report.json())["ops"]["kv_write"]["worst_error"] is None
    assert not report.ok
    assert "broken" in report.markdown()
