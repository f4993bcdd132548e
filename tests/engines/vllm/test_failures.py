"""Starts that must fail in the worker, and say why: a missing target, ranks that differ, an op switched off."""

from __future__ import annotations

import json

from tests.engines.tiny_models import model_path
from tests.engines.vllm.engine import run


def test_missing_target_of_a_patch_fails_the_start() -> None:
    target = "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache"
    done = run("generate", str(model_path("deepseek_v32")), "--break", target, BAIGE_BACKEND="reference")
    assert done.status != 0
    assert f"MountError: vllm 0.33.0: patch target {target}.get_attn_backend is missing" in done.log
    assert "row window >=0.30,<0.34" in done.log


def test_ranks_that_differ_fail_on_both() -> None:
    differing = json.dumps([{"BAIGE_CHECKS": "values"}, {}])
    model = str(model_path("deepseek_v3"))
    done = run("data_parallel", model, "--rank-environment", differing, BAIGE_BACKEND="reference")
    assert done.status != 0
    assert done.log.count("RankMismatch: activation records differ at settings.checks: rank 0 has") >= 2


def test_op_that_the_model_needs_cannot_be_switched_off() -> None:
    options = json.dumps({"additional_config": {"baige": {"ops": "attend_paged=off"}}})
    done = run("generate", str(model_path("smollm2")), "--options", options, BAIGE_BACKEND="reference")
    assert done.status != 0
    assert "MountError: vllm: attend_paged is needed by our layers" in done.log
    assert "switched off by BAIGE_OPS=attend_paged=off" in done.log
