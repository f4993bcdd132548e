"""Greedy tokens equal transformers': MLA with MoE and DSA models on several ranks, and our attention by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.engines.sglang.engine import ROOT, run
from tests.engines.sglang.fake_host import vendor_platform
from tests.engines.tiny_models import expected_cases, model_path

MOE = {"moe_dispatch", "moe_expert_ffn", "moe_combine"}


def generate(model: str, options: dict[str, Any], **settings: str) -> dict[str, Any]:
    checked = {"BAIGE_BACKEND": "reference", "BAIGE_CHECKS": "values", **settings}
    answer = run("generate", str(model_path(model)), json.dumps(options), **checked).answer
    assert answer["tokens"] == [case["output"] for case in expected_cases(model_path(model))]
    return answer


def called(report: dict[str, Any]) -> set[str]:
    return {op for op, calls in report["calls"].items() if calls}


def test_mla_and_moe_on_two_data_and_expert_parallel_ranks() -> None:
    options = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "deepep"}
    answer = generate("deepseek_v3", options)
    assert answer["attention_backend"] == "baige"
    assert answer["cached"][-1] > 0  # the last prompt extends an earlier one
    first, second = answer["reports"]
    assert called(first) == called(second) == {"attend_paged", "kv_write", *MOE}
    assert first["calls"]["moe_dispatch"] == first["calls"]["moe_combine"] == second["calls"]["moe_dispatch"]
    assert first["record"] == second["record"]


def test_dsa_and_moe_on_two_tensor_and_expert_parallel_ranks() -> None:
    answer = generate("deepseek_v32", {"tp_size": 2, "ep_size": 2})
    assert answer["attention_backend"] == "dsa"
    assert max(len(case["prompt"]) for case in expected_cases(model_path("deepseek_v32"))) > 2 * 128  # index_topk
    assert answer["cached"][-1] > 0
    (report,) = answer["reports"]  # SGLang asks the first rank of a replica
    assert called(report) == {"sparse_attention", "index_topk", "kv_write", *MOE}
    assert report["calls"]["index_topk"] == report["calls"]["sparse_attention"]
    assert report["calls"]["kv_write"] == 3 * report["calls"]["sparse_attention"]  # latent, rope, index key


def test_attention_by_name_on_the_platform_of_another(tmp_path: Path) -> None:
    path = os.pathsep.join([vendor_platform(tmp_path), str(ROOT)])
    answer = generate("deepseek_v3", {"attention_backend": "baige"}, BAIGE_BACKEND="auto", PYTHONPATH=path)
    assert answer["attention_backend"] == "baige"
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged", "kv_write"}  # experts are the host's
    assert report["record"]["reason"] == "no accelerator is present"
