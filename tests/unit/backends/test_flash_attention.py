"""FlashAttention's adapter without a GPU: the kit over a stand-in for its op, argument lists, choice and offer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from baige_device.backends.cuda import attention_offers, flash_attention, flash_attention_library, flash_mla_library
from baige_device.backends.cuda import plugin as cuda_plugin
from baige_device.backends.cuda.flash_attention_shapes import head_sizes_fit
from baige_device.backends.reference import plugin as reference_plugin
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict
from baige_device.testing import BackendConformance
from tests.unit.backends.flash_attention_stand_in import ENGINE, PACKAGE, calls, register, stand_in

H200 = DeviceInfo("cuda", "cuda", "NVIDIA H200", {"compute_capability": (9, 0)})


@hookimpl
def attend_paged(device: DeviceInfo) -> Offer:
    real = attention_offers.attend_paged(device)[0]
    return Offer(real.target, Tier.TUNED, supports=real.supports)


OFFERED = SimpleNamespace(baige_probe=reference_plugin.baige_probe, attend_paged=attend_paged)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr(flash_attention, "_library", stand_in)


class TestKit(BackendConformance):
    backend = "flash-attention-stand-in"
    plugin = "tests.unit.backends.test_flash_attention:OFFERED"
    ops = ("attend_paged",)
    seed = 20261130


def batch(**changes: Any) -> dict[str, Any]:
    """Two requests of 3 and 1 queries and one row of padding, 4 heads over 2; changes replace arguments."""
    args = {
        "q": torch.randn(5, 4, 64).bfloat16(),
        "k_cache": torch.randn(8, 16, 2, 64).bfloat16(),
        "v_cache": torch.randn(8, 16, 2, 64).bfloat16(),
        "block_table": torch.arange(6, dtype=torch.int32).view(2, 3),
        "q_starts": torch.tensor([0, 3, 4], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 17], dtype=torch.int32),
        "scale": 0.125,
    }
    return args | changes


def test_latent_of_mla_is_given_as_values_and_the_rest_as_keys() -> None:
    cache = torch.randn(8, 16, 1, 576).bfloat16()
    flash_attention.attend_paged(**batch(q=torch.randn(5, 4, 576).bfloat16(), k_cache=cache, v_cache=None, v_dim=512))
    assert calls[0]["q_v"].shape == (5, 4, 512)


def test_unknown_lengths_are_bounded_by_what_the_host_knows() -> None:
    flash_attention.attend_paged(**batch())
    flash_attention.attend_paged(**batch(max_query_tokens=3, max_seq_tokens=41))
    flash_attention.attend_paged(**batch(max_query_tokens=9, max_seq_tokens=900))
    assert [(call["max_seqlen_q"], call["max_seqlen_k"]) for call in calls] == [(5, 48), (3, 41), (5, 48)]


def test_large_pages_are_read_row_by_row() -> None:
    caches = {name: torch.randn(8, 64, 2, 64).bfloat16() for name in ("k_cache", "v_cache")}
    few, many = torch.randn(5, 4, 64).bfloat16(), torch.randn(5, 64, 64).bfloat16()
    flash_attention.attend_paged(**batch(**caches, q=few))
    out, _ = flash_attention.attend_paged(**batch(**caches, q=many))
    assert [call["leftpad_k"] is not None for call in calls] == [False, True]
    assert bool(torch.isfinite(out).all())


def test_a_given_result_is_written_in_place_where_it_is_aligned() -> None:
    aligned, shifted = torch.empty(5, 4, 64).bfloat16(), torch.empty(5 * 4 * 64 + 1).bfloat16()[1:].view(5, 4, 64)
    first, _ = flash_attention.attend_paged(**batch(out=aligned))
    args = batch(out=shifted)
    second, _ = flash_attention.attend_paged(**args)
    third, _ = flash_attention.attend_paged(**(args | {"out": None}))
    assert first is aligned
    assert second is shifted
    assert torch.equal(second, third)


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.randn(5, 4, 64)},
        {"k_cache": torch.randn(8, 16, 2, 65).bfloat16()[..., 1:]},
        {"v_cache": torch.randn(8, 16, 2, 32).bfloat16()},
        {"scale": -0.125},
        {"q": torch.randn(0, 4, 64).bfloat16()},
        {"window": 256, "max_query_tokens": 1},
    ],
    ids=["fp32-queries", "unaligned-keys", "narrow-values", "negative-scale", "no-queries", "small-window"],
)
def test_other_shapes_go_to_triton(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(flash_attention, "portable", lambda *args, **rest: asked.append(rest))
    flash_attention.attend_paged(**batch(**changes), max_seq_tokens=44)
    assert not calls
    assert asked[0]["max_seq_tokens"] == 44


def test_parts_are_bounded_by_the_device_the_keys_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "processors", lambda device: 132)
    device = torch.device("cpu")
    flash_attention._splits.cache_clear()

    def splits(rows: int, groups: int, keys: int, outputs: int, window: int = 0) -> int:
        return flash_attention._splits(rows, groups, keys, window, outputs, device)

    assert splits(4, 8, 32768, 32 * 128) == 16
    assert splits(4, 8, 1024, 32 * 128) == 8
    assert splits(4, 8, 512, 32 * 128) == 1
    assert splits(4, 8, 32768, 32 * 128, window=256) == 1
    assert splits(4096 * 4, 8, 4096, 4096 * 32 * 128) == 1
    assert splits(128, 1, 8192, 256 * 128 * 512) == 4
    flash_attention._splits.cache_clear()


def test_both_argument_lists_are_put_in_order() -> None:
    engine = flash_attention_library.adapt("engine", register("baige_test_fa_engine", ENGINE))
    package = flash_attention_library.adapt("package", register("baige_test_fa_package", PACKAGE))
    assert engine is not None
    assert package is not None
    assert dict(engine.arguments)["cp_world_size"] == 1
    assert dict(package.arguments)["attention_chunk"] == 0
    monkey = batch()
    want = flash_attention.attend_paged(**monkey)
    for build in (engine, package):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash_attention, "_library", lambda build=build: build)
            got = flash_attention.attend_paged(**monkey)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("lacks", ENGINE.replace("Tensor? page_table, ", "")), ("wants", f"{ENGINE}, Tensor unheard_of")],
)
def test_an_op_with_other_arguments_is_refused(name: str, arguments: str) -> None:
    assert flash_attention_library.adapt("other", register(f"baige_test_fa_{name}", arguments)) is None


def test_the_offer_says_what_is_missing() -> None:
    offer = attention_offers.attend_paged(H200)[0]
    assert offer.tier == Tier.TUNED
    assert not offer.available
    assert "flash_attn_3" in offer.available.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"compute_capability": (9, 0)}, ""),
        ({"compute_capability": (8, 9)}, "compute capability 8.9; its kernels need 9.0"),
        ({}, "no CUDA device"),
    ],
)
def test_the_generation_is_the_probe_s_fact_and_cuda_stays_untouched(
    facts: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def initialise() -> None:
        pytest.fail("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    monkeypatch.setattr(torch.cuda, "is_available", initialise)
    monkeypatch.setattr(flash_attention_library, "find_flash_attention", lambda: (object(), ""))
    monkeypatch.setattr(flash_mla_library, "find_flash_mla", object)
    card = DeviceInfo("cuda", "cuda", "a card", facts)
    for op in ("attend_paged", "sparse_attention"):
        verdict = getattr(cuda_plugin, op)(card)[0].available
        assert (bool(verdict), verdict.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("params", "refused"),
    [
        ({"dtype": "bfloat16", "head_size": 128, "v_head_size": 128}, ""),
        ({"dtype": "float16", "head_size": 80}, ""),
        ({"head_size": 192, "v_head_size": 128}, ""),
        ({"head_size": 576, "v_head_size": 512, "mla": True}, ""),
        ({}, ""),
        ({"dtype": "float32"}, "not float32"),
        ({"head_size": 512, "v_head_size": 512}, "not 512 with 512"),
        ({"head_size": 100}, "not 100 with 100"),
        ({"head_size": 64, "v_head_size": 32}, "not 64 with 32"),
        ({"head_size": 576, "v_head_size": 512}, "not 576 with 512"),
        ({"head_size": 320, "v_head_size": 256, "mla": True}, "not 320 with 256"),
    ],
)
def test_a_need_is_judged_by_type_and_head_sizes(params: dict[str, Any], refused: str) -> None:
    verdict: Verdict = attention_offers.attend_paged(H200)[0].supports(Need("attend_paged", "test", params))
    assert bool(verdict) is not bool(refused)
    assert refused in verdict.reason


def test_head_sizes_of_nothing_do_not_fit() -> None:
    assert not head_sizes_fit(0, 0, False)
