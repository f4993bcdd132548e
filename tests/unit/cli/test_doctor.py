"""`baige-device doctor`: what is asked for and cannot work decides the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from baige_device.cli.app import app
from baige_device.cli.diagnosis_hisparse import _memlock
from baige_device.ops import OP_NAMES
from baige_device.ops.host_alloc.limits import MemoryLimit
from baige_device.optimizations.hisparse.setup import HISPARSE_OPS
from baige_device.registry import choice, manager
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.manager import sources
from baige_device.registry.offers import DeviceInfo, Offer, Probe
from tests.unit.registry.fakes import backend, offering, source


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
        ("BAIGE_BACKEND", "of", "expected one of auto, off, cuda"),
        ("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "1e300", "setting hisparse.host_gib_per_node"),
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


def add_chip(monkeypatch: pytest.MonkeyPatch, *plugins: object) -> None:
    """Sources beside the built-in ones, all of the name acme."""
    found = [*sources(entry_points=()), *(source("acme", plugin, "acme-dist 1.0") for plugin in plugins)]
    monkeypatch.setattr(choice, "sources", lambda: found)
    monkeypatch.setattr(manager, "sources", lambda: found)


def exiting() -> SimpleNamespace:
    @hookimpl
    def baige_probe() -> Probe:
        raise SystemExit(3)

    return SimpleNamespace(baige_probe=baige_probe)


@pytest.mark.parametrize(
    ("plugins", "cause"),
    [
        ([ImportError("libfoo.so")], "ImportError: libfoo.so"),
        ([backend(), backend()], "two backends are named 'acme'"),
        ([exiting()], "SystemExit: 3"),
    ],
    ids=["import", "twice", "exit"],
)
def test_a_plugin_that_cannot_answer_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, plugins: list[object], cause: str
) -> None:
    add_chip(monkeypatch, *plugins)
    status, found = run()
    assert status == 1
    (problem,) = found["problems"]
    assert "backend 'acme' (acme-dist 1.0" in problem
    assert cause in problem
    assert found["chosen"] == "reference"
    assert "no accelerator is present" not in json.dumps(found)
    monkeypatch.setenv("BAIGE_BACKEND", "reference")
    assert run()[0] == 0  # nobody asks the plugin


def two_arguments(values: object, cache: object) -> None:
    """`kv_write` without its slots."""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("acme_nowhere:kv_write", "which cannot be loaded: ModuleNotFoundError: No module named 'acme_nowhere'"),
        (two_arguments, "which lacks slots"),
    ],
)
def test_an_implementation_that_activation_would_refuse_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    add_chip(monkeypatch, backend(offers={"kv_write": offering(target)}))
    status, found = run()
    assert status == 1
    assert [message in problem for problem in found["problems"]] == [True]
    assert found["problems"] == [found["ops"]["kv_write"][0]["reason"]]


def test_a_hook_that_exits_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl
    def kv_write(device: DeviceInfo) -> Offer:
        raise SystemExit(3)

    plugin = backend()
    plugin.kv_write = kv_write
    add_chip(monkeypatch, plugin)
    status, found = run()
    assert status == 1
    assert "kv_write: backend 'acme' (acme-dist 1.0): hook kv_write raises SystemExit: 3" in found["problems"]


@pytest.mark.parametrize("output", ["/nonexistent/doctor.json", "/"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setattr("baige_device.cli.doctor.diagnose", lambda mounts: pytest.fail("it was diagnosed"))
    result = CliRunner().invoke(app, ["doctor", "--output", output], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"--output: expected a file in a folder that exists, got {output}" in result.output


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
    monkeypatch.setenv("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "1e6")
    monkeypatch.setenv("BAIGE_OPS", "uva_sparse_gather=off")
    status, found = run()
    assert status == 1
    assert found["hisparse"]["limits"]["the machine (MemAvailable)"].startswith("too small: leaves ")
    for message in (
        "hisparse: needs uva_sparse_gather: switched off by BAIGE_OPS=uva_sparse_gather=off",
        "hisparse.host_gib_per_node: asked for 1000000.00 GiB on this node, but the machine",
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
