"""Which of SGLang's MoE layers our ops compute; the others are refused when the model is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baige_device.engines.sglang.moe import ACTIVATIONS, _refuse_unknown_layer
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
