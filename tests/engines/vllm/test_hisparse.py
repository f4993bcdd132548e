"""HiSparse in vLLM on our platform: the tokens of an ordinary start, and pools that come back as they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baige_device.cli.demo_server import free_port
from tests.engines import kunlun_models
from tests.engines.emulated import kunlun
from tests.engines.tiny_models import expected_cases, model_path
from tests.engines.vllm.engine import run

REFERENCE = {"BAIGE_BACKEND": "reference"}
TOPK, BLOCK_TOKENS, LAYERS = 128, 16, 3
BLOCKS = 100
"""One request of the longest context (1584 tokens) and the block manager's own: three shorter ones don't fit."""
ROW_BYTES = 320 * 4
GIB = 1 << 30
SHARED = {"hf_overrides": {"index_topk_pattern": "FSF"}}
"""Layer 1 takes the top-k of layer 0; its own indexer's weights stay unused."""


def drive(model: Path, scenarios: str, options: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    return run("hisparse", str(model), *scenarios.split(), "--options", json.dumps(options), **environment).answer


def hisparse(**settings: object) -> dict[str, Any]:
    host_gib = (BLOCKS + 0.5) * LAYERS * BLOCK_TOKENS * ROW_BYTES / GIB
    return {"additional_config": {"baige": {"hisparse": {"host_gib_per_node": host_gib, **settings}}}}


NATIVE = {
    "attention_config": {"hisparse_config": {"device_buffer_size": 2 * TOPK}},
    "kv_transfer_config": {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 0.02},
    },
}
"""vLLM's own options, whose gate admits NVIDIA alone."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """All engines of this file, two at a time: starting one takes longer than all that it is asked."""
    tiny, half = model_path("deepseek_v32"), kunlun_models.model_path("deepseek_v32")
    served = {**REFERENCE, "BAIGE_METRICS_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        yield {
            "on": pool.submit(drive, tiny, "long many overlapped preempt abort metrics", hisparse() | SHARED, served),
            "off": pool.submit(drive, tiny, "long many preempt", SHARED, REFERENCE),
            "chip": pool.submit(drive, half, "known long", {"dtype": "float16", **NATIVE}, kunlun()),
            "chip off": pool.submit(drive, half, "long", {"dtype": "float16"}, kunlun()),
        }


@pytest.fixture(scope="module")
def on(engines: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return engines["on"].result()


@pytest.fixture(scope="module")
def off(engines: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return engines["off"].result()


def test_a_context_of_six_hot_buffers_with_and_without_the_prefix_cache(
    on: dict[str, Any], off: dict[str, Any]
) -> None:
    assert on["long"]["tokens"] == off["long"]["tokens"]
    assert on["long"]["prompt_tokens"] >= 6 * on["long"]["report"]["hot_tokens"] == 6 * 2 * TOPK
    queried, hit = on["long"]["cached"]
    assert hit >= 0.9 * queried
    report = on["long"]["report"]
    assert report["hits"] > 0
    assert report["groups"] == [0, 0, 1]
    assert LAYERS * report["missed"] > report["swapped_bytes"] / ROW_BYTES > report["missed"] > 0


def test_eight_requests_at_once(on: dict[str, Any], off: dict[str, Any]) -> None:
    assert on["many"]["tokens"] == off["many"]["tokens"]
    assert len(on["many"]["tokens"]) == 8
    assert on["overlapped"]["tokens"] == off["many"]["tokens"]


def test_preempted_in_mid_decode_and_resumed(on: dict[str, Any], off: dict[str, Any]) -> None:
    assert on["preempt"]["tokens"] == off["preempt"]["tokens"]
    assert on["preempt"]["report"]["preempted"] > on["overlapped"]["report"]["preempted"]


def test_aborted_in_mid_decode_and_in_mid_prompt(on: dict[str, Any]) -> None:
    found = on["abort"]
    assert found["held"]["free_hot_rows"] == found["held"]["hot_rows"] - 3
    assert found["names"] == ["kept"]
    assert found["tokens"] == found["alone"]


def test_pools_come_back_as_they_were(on: dict[str, Any]) -> None:
    for name, found in on.items():
        assert found["settled"] == {"held_blocks": 0, "held_hot_rows": 0}, name
        assert found["report"]["host_blocks"] == BLOCKS


def test_metrics_are_served(on: dict[str, Any]) -> None:
    values = on["metrics"]["values"]
    assert values["baige_hisparse_wanted_total"] > values["baige_hisparse_missed_total"] > 0
    assert values["baige_hisparse_swapped_bytes_total"] == values["baige_hisparse_swapped_rows_total"] * ROW_BYTES > 0
    assert values["baige_hisparse_hot_rows_free"] == on["metrics"]["report"]["hot_rows"]


def test_on_kunlun_through_the_options_of_the_host(engines: dict[str, Future[dict[str, Any]]]) -> None:
    chip = engines["chip"].result()
    cases = expected_cases(kunlun_models.model_path("deepseek_v32"))
    assert chip["known"]["tokens"] == [case["output"] for case in cases]
    assert chip["long"]["tokens"] == engines["chip off"].result()["long"]["tokens"]
    report = chip["long"]["report"]
    assert report["hot_tokens"] == 2 * TOPK
    assert min(report["hits"], report["missed"]) > 0
    for found in chip.values():
        assert found["settled"] == {"held_blocks": 0, "held_hot_rows": 0}


def test_what_it_cannot_be_combined_with() -> None:
    sparse, dense = (str(model_path(name)) for name in ("deepseek_v32", "deepseek_v3"))
    native = {"attention_config": {"hisparse_config": {"device_buffer_size": 384}}}
    connector = {"kv_connector": "HiSparseConnector", "kv_role": "kv_both"}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    cases = [
        (dense, hisparse()),
        (sparse, hisparse() | {"pipeline_parallel_size": 2}),
        (sparse, hisparse() | {"kv_transfer_config": other}),
        (sparse, hisparse() | {"kv_cache_dtype": "fp8"}),
        (sparse, hisparse(hot_tokens=100)),
        (sparse, native),
        (sparse, native | hisparse(hot_tokens=512)),
        (sparse, {"kv_transfer_config": connector | {"kv_connector_extra_config": {"host_pool_gib": 2}}}),
    ]
    asked = json.dumps([{"model": model, "options": options} for model, options in cases])
    *refused, nameless, ours_wins, theirs = run("hisparse_options", stdin=asked, **REFERENCE).answers
    wanted = (
        "expected a DSA model (MLA with index_topk)",
        "pipeline_parallel_size: expected 1, got 2",
        "--kv-transfer-config: expected none, got ExampleConnector",
        "--kv-cache-dtype: expected auto (the model's torch.float32), got fp8",
        "hisparse.hot_tokens: expected >= 128 (top-k 128), got 100",
    )
    for answer, text in zip(refused, wanted, strict=True):
        assert text in answer["error"]
    assert "BAIGE_HISPARSE__HOST_GIB_PER_NODE=N" in nameless["error"]
    assert ours_wins["hisparse"]["hot_tokens"] == 512
    assert theirs["hisparse"]["host_gib_per_node"] == 2
    assert not any(answer[kind] for answer in (ours_wins, theirs) for kind in ("native", "connector"))
