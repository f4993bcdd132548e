"""The bench runner without a GPU: what it refuses, what it collects, what it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from baige_device.cli import bench_report
from baige_device.cli.app import app
from baige_device.cli.bench_case import BenchCase, Peer
from baige_device.cli.bench_timing import Limits

CASES = """
from baige_device.cli.bench_case import BenchCase, Peer
OPS = ("kv_write",)
def wrong(): raise AssertionError("kv_write: planted")
def cases():
    fine = lambda: None
    peer = Peer("other", lambda i: None, fine)
    yield BenchCase("kv_write", "right", lambda i: None, fine, 1000, "link", peers=(peer,))
    yield BenchCase("kv_write", "wrong", lambda i: None, wrong, 1000, "link")
"""
LIMITS = Limits(link=1e9, copy=4e12, matmul=8e14)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bench_planted.py").write_text(CASES)
    monkeypatch.setattr(bench_report, "time_us", lambda run, sets, capturable: 2.0)
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows the refusal without a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "expected a CUDA device" in result.output


def test_without_benchmark_files_the_command_says_where_they_are(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--cases", str(tmp_path)])
    assert result.exit_code == 2
    assert f"--cases: expected a folder with bench_*.py, got {tmp_path}; they are in the repository" in result.stderr


@pytest.mark.parametrize("path", sorted(Path("benchmarks").glob("bench_*.py")), ids=lambda path: path.stem)
def test_the_repositorys_files_are_imported_without_a_gpu(path: Path) -> None:
    assert bench_report._load(path).OPS


def test_without_torch_there_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, ["bench", "--cases", str(folder)])
    assert result.exit_code == 2
    assert result.stderr.startswith("bench: needs torch, which cannot be imported: ")
    assert result.stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_refused_before_the_work(folder: Path) -> None:
    (folder / "out.json").mkdir()
    result = CliRunner().invoke(app, ["bench", "--cases", str(folder), "--out", str(folder / "out")])
    assert result.exit_code == 2
    assert "--out: expected a file" in result.output


def test_cases_are_matched_by_op_and_name_and_share_is_of_the_limit(folder: Path) -> None:
    found = list(bench_report.collect(folder, ["kv_write"], "right", LIMITS))
    assert [(result.case, result.us, result.peers_us) for result in found] == [("right", 2.0, {"other": 2.0})]
    assert found[0].percent_of_limit == pytest.approx(50.0)
    assert list(bench_report.collect(folder, ["moe_combine"], "", LIMITS)) == []


def test_a_wrong_result_is_never_timed(folder: Path) -> None:
    with pytest.raises(AssertionError, match="planted"):
        list(bench_report.collect(folder, [], "wrong", LIMITS))


def test_the_written_file_has_card_versions_date_and_cases(folder: Path, tmp_path: Path) -> None:
    environment = {"card": "card", "versions": {"torch": "2"}, "date": "2026-01-01"}
    results = list(bench_report.collect(folder, [], "right", LIMITS))
    bench_report.Report(environment, LIMITS, results).write(tmp_path / "deep" / "out")
    body = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert body["card"] == "card"
    assert body["limits_per_s"] == {"link": 1e9, "copy": 4e12, "matmul": 8e14}
    assert body["cases"][0]["percent_of_limit"] == 50.0
    assert set(body["cases"][0]) >= {"op", "case", "us", "peers_us", "percent_of_limit", "limit"}


def test_a_case_needs_no_peer() -> None:
    case = BenchCase("kv_write", "alone", lambda index: None, lambda: None, 1, "copy")
    assert case.peers == ()
    assert Peer("name", case.run, case.verify).name == "name"
