"""Greedy tokens equal transformers': dense, MLA with MoE, and DSA models, on one rank and on several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from baige_device.cli.demo_server import free_port
from tests.engines.tiny_models import expected_cases, model_path
from tests.engines.vllm.engine import ROOT, Run, run
from tests.engines.vllm.fake_host import vendor_platform


def generate(model: str, *arguments: str, **settings: str) -> dict[str, Any]:
    return run("generate", str(model_path(model)), *arguments, **{"BAIGE_BACKEND": "reference", **settings}).answer


def expected(model: str) -> list[list[int]]:
    return [case["output"] for case in expected_cases(model_path(model))]


def called(report: dict[str, Any]) -> set[str]:
    return {op for op, calls in report["calls"].items() if calls}


def test_dense_model_is_exact_and_every_layer_went_through_our_ops() -> None:
    port = free_port()
    options = {"additional_config": {"baige": {"checks": "values"}}}
    answer = generate("smollm2", "--options", json.dumps(options), "--metrics", str(port), BAIGE_METRICS_PORT=str(port))
    assert answer["tokens"] == expected("smollm2")
    cases = expected_cases(model_path("smollm2"))
    assert len(cases) == 5
    assert max(len(case["prompt"]) for case in cases) >= 700  # in chunks of 128
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged", "kv_write"}
    assert report["calls"]["kv_write"] == 2 * report["calls"]["attend_paged"]
    assert report["calls"]["attend_paged"] % 30 == 0  # layers
    assert report["record"]["backend"] == "reference"
    assert report["record"]["engine"].startswith("vllm 0.")
    assert f'op="attend_paged",tier="reference"}} {float(report["calls"]["attend_paged"])}' in answer["metrics"]


def test_mla_and_moe_model_is_exact() -> None:
    answer = generate("deepseek_v3")
    assert answer["tokens"] == expected("deepseek_v3")
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged", "kv_write", "moe_dispatch", "moe_expert_ffn", "moe_combine"}
    assert report["calls"]["moe_dispatch"] == report["calls"]["moe_combine"]


def test_dsa_model_is_exact_on_two_tensor_parallel_ranks() -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    answer = generate("deepseek_v32", "--options", json.dumps(options))
    assert answer["tokens"] == expected("deepseek_v32")
    assert max(len(case["prompt"]) for case in expected_cases(model_path("deepseek_v32"))) > 2 * 128  # index_topk
    first, second = answer["reports"]
    assert called(first) >= {"sparse_attention", "index_topk", "kv_write", "moe_dispatch", "moe_combine"}
    assert "attend_paged" not in called(first)
    assert first["calls"]["index_topk"] == first["calls"]["sparse_attention"] == second["calls"]["index_topk"]
    assert first["record"] == second["record"]


@pytest.fixture(scope="module")
def data_parallel() -> Run:
    options = {"additional_config": {"baige": {"hisparse": {"host_gib_per_node": 0.1}}}}
    arguments = (str(model_path("deepseek_v32")), "--options", json.dumps(options))
    return run("data_parallel", *arguments, BAIGE_BACKEND="reference")


def test_data_and_expert_parallel_ranks_give_the_tokens_of_one_rank(data_parallel: Run) -> None:
    assert data_parallel.status == 0, data_parallel.log[-6000:]
    wanted = expected("deepseek_v32")
    for answer in data_parallel.answers:
        for tokens, whole in zip(answer["tokens"], wanted[answer["rank"] :: 2], strict=True):
            assert tokens == whole[: len(tokens)]
    first, second = (answer["reports"][0]["calls"] for answer in sorted(data_parallel.answers, key=lambda a: a["rank"]))
    assert first["moe_dispatch"] == first["moe_combine"] == second["moe_dispatch"] == second["moe_combine"] > 0
    # The first ends early and runs dummy batches for the second; those must not write rows of its last step again.
    assert 0 < first["uva_sparse_scatter"] < second["uva_sparse_scatter"]


def test_collectives_with_a_row_count_per_rank(data_parallel: Run) -> None:
    assert len(data_parallel.answers) == 2, data_parallel.log[-6000:]
    scattered = {0: [[0.0, 3.0, 6.0]], 1: [[9.0, 12.0, 15.0], [18.0, 21.0, 24.0]]}
    for answer in data_parallel.answers:
        (found,) = answer["gathered"]
        assert found["gathered"] == [[0.0] * 3, [1.0] * 3, [1.0] * 3]
        assert found["scattered"] == scattered[answer["rank"]]


def test_attention_by_name_on_the_platform_of_another(tmp_path: Path) -> None:
    options = json.dumps({"attention_backend": "BAIGE"})
    path = os.pathsep.join([vendor_platform(tmp_path), str(ROOT)])
    answer = generate("smollm2", "--cases", "3", "--options", options, BAIGE_BACKEND="auto", PYTHONPATH=path)
    assert answer["tokens"] == expected("smollm2")[:3]
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged", "kv_write"}
    assert report["record"]["reason"] == "no accelerator is present"
    assert report["mounted"] == [
        "vllm.v1.attention.backends.registry:register_backend",
        "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel",  # the borrowed runner's
    ]
