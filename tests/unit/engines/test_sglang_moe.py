"""Which of SGLang's MoE layers our ops compute; the others are refused when the model is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baige_device.engines.sglang.moe import ACTIVATIONS, _refuse_unknown_layer
from baige_device.engines.sglang.moe_scale import BLOCKS, first_scale, runner_scale
from baige_device.errors import MountError
from baige_device.ops.moe_expert_ffn import contract


class UnquantizedFusedMoEMethod:
    """SGLang's method by name."""

    with_bias = False


def layer(activation: str, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(layer_id=3, activation=activation, is_gated=True, **options)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_known_activations_are_those_of_the_op(activation: str) -> None:
    _refuse_unknown_layer(layer(activation), UnquantizedFusedMoEMethod())
    assert ACTIVATIONS[activation] in contract.ACTIVATIONS


def test_exact_gelu_is_not_taken_for_its_tanh_form() -> None:
    with pytest.raises(MountError, match="expected gated silu or gelu_tanh, got gelu "):
        _refuse_unknown_layer(layer("gelu"), UnquantizedFusedMoEMethod())


def test_what_the_op_does_not_compute_is_named() -> None:
    with pytest.raises(MountError, match="swiglu_limit: not served"):
        _refuse_unknown_layer(layer("silu", swiglu_limit=7.0), UnquantizedFusedMoEMethod())


def block(path: str) -> type:
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": f"sglang.srt.models.{module}"})


def scale(path: str, **host: bool) -> float:
    return runner_scale("layer", block(path), 2.5, **host)


def test_a_block_that_multiplies_itself_leaves_it_to_the_runner_only_on_cuda() -> None:
    path = "deepseek_v2.DeepseekV2MoE"
    assert scale(path, cuda=False, all_to_all=False) == 1.0
    assert scale(path, cuda=True, all_to_all=False) == 2.5
    assert scale(path, cuda=False, all_to_all=True) == scale(path, cuda=True, all_to_all=True) == 1.0


def test_a_block_that_leaves_it_to_the_runner_does_so_everywhere() -> None:
    path = "bailing_moe.BailingMoESparseMoeBlock"
    assert scale(path, cuda=False, all_to_all=False) == scale(path, cuda=True, all_to_all=False) == 2.5
    with pytest.raises(MountError, match="with --moe-a2a-backend nobody multiplies in sglang"):
        scale(path, cuda=False, all_to_all=True)


def test_a_block_of_another_module_or_name_is_not_guessed() -> None:
    for path in ("deepseek_v2.OtherMoE", "other.DeepseekV2MoE"):
        with pytest.raises(
            MountError, match=r"layer: expected a block of which it is known .* BAIGE_OPS=moe_dispatch=off"
        ):
            scale(path, cuda=False, all_to_all=False)
    with pytest.raises(MountError, match=r"got my\.DeepseekV2MoE"):
        runner_scale("layer", type("DeepseekV2MoE", (), {"__module__": "my"}), 2.5, cuda=False, all_to_all=False)
    assert all(path.count(".") == 1 for path in BLOCKS)


def test_without_a_factor_nothing_has_to_be_known() -> None:
    assert first_scale(None) == first_scale(1.0) == 1.0
    assert first_scale(2.5) is None
