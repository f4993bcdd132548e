"""Starts that must fail in the worker, and say why (user-demand cases A1, A4, A6)."""

from __future__ import annotations

import os
from pathlib import Path

from tests.engines.fakes import distribution, host_tensor_backend
from tests.engines.sglang.engine import ROOT, run
from tests.engines.tiny_models import model_path

DIFFER = """
import multiprocessing
import os


def differ():
    if multiprocessing.current_process().name == "Process-2":
        os.environ["BAIGE_CHECKS"] = "values"
"""


def test_ranks_that_differ_fail_on_both(tmp_path: Path) -> None:
    site = distribution(
        tmp_path,
        "differ",
        entry_points="[sglang.srt.plugins]\na_differ = differ_plugin:differ\n",
        modules={"differ_plugin": DIFFER},
    )
    path = os.pathsep.join([site, str(ROOT)])
    done = run("generate", str(model_path("deepseek_v3")), '{"tp_size": 2}', BAIGE_BACKEND="reference", PYTHONPATH=path)
    assert done.status != 0
    assert "RankMismatch: activation records differ at settings.checks: rank 0 has" in done.log


def test_broken_plugin_of_a_chip_in_the_machine_stops_the_start(tmp_path: Path) -> None:
    path = os.pathsep.join([host_tensor_backend(tmp_path, broken=True), str(ROOT)])
    done = run("generate", str(model_path("deepseek_v3")), "{}", PYTHONPATH=path)
    assert done.status == 1
    assert "baige-device: BackendError: backend 'acme'" in done.log
    assert "its hardware is in this machine: ImportError: libacme.so" in done.log
    assert done.answers == []


def test_chip_that_does_not_serve_the_model_stops_the_start(tmp_path: Path) -> None:
    path = os.pathsep.join([host_tensor_backend(tmp_path), str(ROOT)])
    done = run("generate", str(model_path("deepseek_v3")), "{}", PYTHONPATH=path)
    assert done.status != 0
    assert "OpUnsupported: moe_dispatch: backend 'acme' cannot serve it: acme offers no moe_dispatch" in done.log
    assert "for DeepseekV3ForCausalLM in SGLang" in done.log
