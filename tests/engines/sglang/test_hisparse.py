"""SGLang's HiSparse over our ops: exact tokens under load, aborts, retraction, overlap, and on Kunlun's emulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines import hisparse_models, kunlun_models
from tests.engines.emulated import kunlun
from tests.engines.sglang.engine import Run, run
from tests.engines.sglang.hisparse import ABORTED, TOKENS_BEFORE_ABORT
from tests.engines.tiny_models import OUTPUT_TOKENS, expected_cases

REFERENCE = {"BAIGE_BACKEND": "reference", "BAIGE_CHECKS": "values"}
SWAPS = {"uva_sparse_gather", "uva_sparse_scatter", "hot_cache_resolve", "host_alloc"}


def loaded(model: Path, options: dict[str, Any], *phases: str, **settings: str) -> tuple[dict[str, Any], Run]:
    done = run("hisparse", str(model), json.dumps(options), *phases, timeout_s=600, **settings)
    return done.answer, done


def hisparse(hot_tokens: int, ratio: int) -> dict[str, Any]:
    config = json.dumps({"device_buffer_size": hot_tokens, "host_to_device_ratio": ratio})
    return {"enable_hisparse": True, "hisparse_config": config}


def check_aborts(answer: dict[str, Any], expected: list[list[int]]) -> None:
    """What was not aborted is whole, what was aborted is a beginning."""
    for number, (tokens, whole) in enumerate(zip(answer["disturbed"], expected, strict=True)):
        assert tokens == whole[: len(tokens)]
        assert len(tokens) >= (TOKENS_BEFORE_ABORT if number in ABORTED else OUTPUT_TOKENS)
    assert min(map(len, answer["disturbed"])) < OUTPUT_TOKENS


def check_swaps(answer: dict[str, Any]) -> dict[str, Any]:
    """Hits and misses happened, and the pools are as they were at the start."""
    (report,) = answer["reports"]
    swaps: dict[str, Any] = report["hisparse"]
    assert swaps["hits"] > 0
    assert swaps["misses"] > 0
    assert swaps["logical_tokens"] == swaps["device_tokens"] == swaps["host_tokens"] == 0
    assert report["record"]["optimizations"] == ["hisparse"]
    assert all(report["calls"][op] for op in SWAPS)
    return dict(report)


def test_eight_requests_get_the_tokens_of_no_hisparse_at_all() -> None:
    """In a small pool, with overlap, two layers that share an index, aborts, and a retraction every seven steps."""
    model = hisparse_models.model_path()
    prompts = [len(case["prompt"]) for case in expected_cases(model)]
    assert len(prompts) == 8
    assert max(prompts) >= 6 * hisparse_models.TOPK
    shared = {"json_model_override_args": json.dumps({"index_topk_pattern": "FSF"})}
    without, _ = loaded(model, {"max_total_tokens": 4096, **shared}, "growth", **REFERENCE)
    assert without["reports"][0]["hisparse"] is None
    settings = {
        "BAIGE_HISPARSE__HOST_GIB_PER_NODE": "0.02",
        "BAIGE_HISPARSE__HOT_TOKENS": str(hisparse_models.TOPK),
        "BAIGE_HISPARSE__OVERLAP": "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "7",
    }
    answer, done = loaded(model, {"max_total_tokens": 1024, **shared}, "aborts", "growth", **REFERENCE, **settings)
    assert answer["tokens"] == without["tokens"]
    check_aborts(answer, without["tokens"])
    assert answer["growing"] == without["growing"]
    report = check_swaps(answer)
    swaps = report["hisparse"]
    assert swaps["misses"] < swaps["swapped_rows"] < 2 * swaps["misses"]  # one of two anchors' copies is replayed
    assert swaps["hot_tokens"] == hisparse_models.TOPK
    assert report["calls"]["merge_attention"] > 0
    assert "#retracted_reqs: 1" in done.log
    assert "HiSparse plan\na request of 2048 tokens: " in done.log
    assert "1024 latent rows / 128 of a hot buffer and its page = 8 requests" in done.log


def test_kunlun_emulator() -> None:
    model = kunlun_models.model_path("deepseek_v32")
    options = {"dtype": "float16", "max_total_tokens": 2048, **hisparse(128, ratio=2)}
    answer, _ = loaded(model, options, **kunlun())
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)]
    report = check_swaps(answer)
    assert report["hisparse"]["swapped_rows"] == report["hisparse"]["misses"]
    used = {op: report["record"]["ops"][op] for op in SWAPS}
    assert {entry["backend"] for entry in used.values()} == {"kunlun"}
