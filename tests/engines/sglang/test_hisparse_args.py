"""Our HiSparse settings and SGLang's flags say one thing, or the start stops with the numbers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.engines.sglang.hisparse_args import agree, ranks_per_node
from baige_device.errors import SettingsError
from baige_device.settings import HiSparseSettings

GIB = 1 << 30
TOKEN_BYTES = 61 * 576 * 2
MODEL = SimpleNamespace(
    hf_text_config=SimpleNamespace(index_topk=2048),
    num_hidden_layers=61,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    dtype=torch.bfloat16,
)


def arguments(**given: Any) -> Any:
    defaults = {
        "enable_hisparse": False,
        "hisparse_config": None,
        "max_total_tokens": 200_000,
        "kv_cache_dtype": "auto",
        "tp_size": 8,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "enable_dp_attention": False,
    }
    return SimpleNamespace(**defaults | given)


def agreed(settings: HiSparseSettings, **given: Any) -> dict[str, Any]:
    fields = agree(settings, arguments(**given), MODEL)
    assert fields.pop("enable_hisparse") is True
    config: dict[str, Any] = json.loads(fields.pop("hisparse_config"))
    assert fields == {}
    return config


def test_without_either_nothing_changes() -> None:
    assert agree(HiSparseSettings(), arguments(), MODEL) == {}


def test_the_settings_switch_it_on_with_derived_sizes() -> None:
    config = agreed(HiSparseSettings(host_gib_per_node=800))
    tokens = 100 * GIB // TOKEN_BYTES - 64
    assert config == {"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": tokens // 200_000}
    assert config["host_to_device_ratio"] == 7
    assert agreed(HiSparseSettings(host_gib_per_node=800, hot_tokens=6144))["device_buffer_size"] == 6144


def test_the_flags_alone_are_completed_with_the_models_top_k() -> None:
    assert agreed(HiSparseSettings(), enable_hisparse=True) == {"top_k": 2048, "device_buffer_size": 4096}
    given = '{"device_buffer_size": 8192, "host_to_device_ratio": 5}'
    config = agreed(HiSparseSettings(host_gib_per_node=1), enable_hisparse=True, hisparse_config=given)
    assert config == {"top_k": 2048, "device_buffer_size": 8192, "host_to_device_ratio": 5}


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        ({"overlap": True}, {}, "add --enable-hisparse or set hisparse.host_gib_per_node"),
        ({"host_gib_per_node": 800}, {"max_total_tokens": None}, "--max-total-tokens, which is not given"),
        ({"host_gib_per_node": 1}, {}, "hold 1909 tokens, and --max-total-tokens 200000 are on the device"),
        ({"host_gib_per_node": 800, "hot_tokens": 2000}, {}, "hot_tokens: expected >= 2048"),
        ({"host_gib_per_node": 800, "hot_tokens": 2100}, {}, "a multiple of SGLang's page of 64 tokens, got 2100"),
        ({"host_gib_per_node": 800, "hot_tokens": 1 << 16}, {}, "expected <= 32768"),
        ({"host_gib_per_node": 800}, {"kv_cache_dtype": "fp8_e4m3"}, "expected auto or bfloat16, got fp8_e4m3"),
        (
            {"hot_tokens": 4096},
            {"enable_hisparse": True, "hisparse_config": '{"device_buffer_size": 8192}'},
            "hisparse.hot_tokens=4096 and device_buffer_size=8192 of --hisparse-config say two things",
        ),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as raised:
        agree(HiSparseSettings(**settings), arguments(**given), MODEL)
    assert words in str(raised.value)


def test_a_model_without_dsa_is_left_to_sglangs_refusal() -> None:
    model = SimpleNamespace(hf_text_config=SimpleNamespace())
    assert agree(HiSparseSettings(host_gib_per_node=1), arguments(), model) == {"enable_hisparse": True}


@pytest.mark.parametrize(
    ("given", "ranks"),
    [({}, 8), ({"dp_size": 8, "enable_dp_attention": True}, 8), ({"dp_size": 2, "tp_size": 4}, 8), ({"nnodes": 4}, 2)],
)
def test_the_nodes_memory_is_split_over_its_ranks(given: dict[str, Any], ranks: int) -> None:
    assert ranks_per_node(arguments(**given)) == ranks
