"""`baige-device doctor`: what is asked for and cannot work decides the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baige_device.cli.app import app
from baige_device.cli.diagnosis_hisparse import _memlock
from baige_device.ops import OP_NAMES
from baige_device.ops.host_alloc.limits import MemoryLimit
from baige_device.optimizations.hisparse.setup import HISPARSE_OPS


def run(*arguments: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    result = CliRunner().invoke(app, ["doctor", "--json", "--no-mounts", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_a_machine_without_an_accelerator_is_fine_and_every_op_is_shown(tmp_path: Path) -> None:
    status, found = run("--output", str(tmp_path / "doctor.json"))
    assert status == 0
    assert found["problems"] == []
    assert found["chosen"] == "reference"
    assert set(found["ops"]) == set(OP_NAMES)
    assert all(candidates[0]["chosen"] for candidates in found["ops"].values())
    assert {item["name"] for item in found["backends"]} >= {"reference", "cuda", "kunlun"}
    assert all(item["reason"] for item in found["backends"])
    assert {item["name"] for item in found["engines"]} == {"vllm", "sglang"}
    assert any("MemAvailable" in name for name in found["host_memory"])
    assert json.loads((tmp_path / "doctor.json").read_text()) == found


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BAIGE_BACKEND", "cuda", "backend 'cuda'"),
        ("BAIGE_BACKEND", "nonsense", "got 'nonsense'"),
        ("BAIGE_CHECKS", "nonsense", "setting checks"),
        ("BAIGE_OPS", "kv_write=tuned", "kv_write: backend 'reference' cannot serve it"),
    ],
)
def test_what_was_asked_for_and_cannot_work_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    status, found = run()
    assert status == 1
    assert any(message in problem for problem in found["problems"]), found["problems"]


def test_switched_off_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAIGE_BACKEND", "off")
    status, found = run()
    assert status == 0
    assert found["chosen"] == ""


def test_an_op_that_is_switched_off_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAIGE_OPS", "kv_write=off")
    status, found = run()
    assert status == 0
    assert found["absent"] == {"kv_write": "switched off by BAIGE_OPS=kv_write=off"}


def test_hisparse_is_off_and_its_ops_are_listed() -> None:
    status, found = run()
    assert status == 0
    hisparse = found["hisparse"]
    assert (hisparse["on"], hisparse["limits"]) == (False, {})
    assert set(hisparse["ops"]) == set(HISPARSE_OPS)
    assert all(row["tier"] == "reference" for row in hisparse["ops"].values())


def test_a_hisparse_pool_is_held_against_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "0.125")
    monkeypatch.setenv("BAIGE_HISPARSE__OVERLAP", "true")
    status, found = run()
    assert status == 0, found["problems"]
    assert "0.125 GiB a node; GiB a rank by local ranks: 0.12 on 1, 0.06 on 2" in found["hisparse"]["host_pool"]
    assert found["hisparse"]["hot_tokens"] == "twice the model's top-k"
    assert found["hisparse"]["limits"]["the machine (MemAvailable)"].startswith("holds the pool: leaves ")
    assert "merge_attention" in found["hisparse"]["ops"]


def test_a_hisparse_pool_that_cannot_be_had_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "1e9")
    monkeypatch.setenv("BAIGE_OPS", "uva_sparse_gather=off")
    status, found = run()
    assert status == 1
    assert found["hisparse"]["limits"]["the machine (MemAvailable)"].startswith("too small: leaves ")
    for message in (
        "hisparse: needs uva_sparse_gather: switched off by BAIGE_OPS=uva_sparse_gather=off",
        "hisparse.host_gib_per_node: asked for 1000000000.00 GiB on this node, but the machine",
    ):
        assert any(message in problem for problem in found["problems"]), found["problems"]


def test_memlock_bounds_each_rank() -> None:
    """An outside chip's pinned memory counts against the limit; enough ranks make the pool fit."""
    limit = MemoryLimit("RLIMIT_MEMLOCK", 1 << 26, "raise it")
    assert "fewer than 16 local ranks is refused; raise it" in _memlock(limit, 1 << 30)
    assert _memlock(limit, 1 << 26).startswith("holds the pool: leaves 0.06 GiB to each process")


def test_the_tables_say_the_same() -> None:
    result = CliRunner().invoke(app, ["doctor", "--no-mounts"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for word in ("reference", "hot_cache_resolve", "needs host_alloc", "vllm", "nothing that was asked for is broken"):
        assert word in result.stdout
