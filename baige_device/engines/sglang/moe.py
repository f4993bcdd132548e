"""MoE layers through `moe_dispatch`, `moe_expert_ffn` and `moe_combine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baige_device.activation import current
from baige_device.engines.sglang.ledger import MOE_CLASS, MOE_DISPATCHER, hook
from baige_device.engines.sglang.moe_scale import bind_scales
from baige_device.errors import MountError

if TYPE_CHECKING:
    from baige_device.settings import Settings

__all__ = ["OPS", "bind_scales", "install", "is_ours"]

OPS = ("moe_dispatch", "moe_expert_ffn", "moe_combine")
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}
"""SGLang's names -> the op's. SGLang's `gelu` is the exact (erf) form, which the op does not have."""
ALL_TO_ALL = "deepep"
"""`--moe-a2a-backend deepep` on our platform: tokens travel by our dispatch and combine instead of DeepEP's kernels."""


def is_ours(settings: Settings) -> bool:
    """False when the user leaves one of the three ops to SGLang; they pass an opaque batch on and go together."""
    return all(settings.ops.get(op) != "off" for op in OPS)


def install() -> None:
    """Mount dispatchers and expert computation, on our platform only."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from baige_device.engines.sglang.platform import DISPATCH_KEY

    hook(MOE_DISPATCHER, _make_dispatcher, "around")
    hook(MOE_CLASS, _moe_class, "around")
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, experts_forward, DISPATCH_KEY)


def experts_forward(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's expert computation of an unquantised layer."""
    from baige_device.engines.sglang.dispatchers import Combine

    activation = ACTIVATIONS[self.moe_runner_config.activation]
    y = current().ops.moe_expert_ffn(dispatch_output.batch, layer.w13_weight, layer.w2_weight, activation=activation)
    return Combine(y, dispatch_output.batch)


def _make_dispatcher(original: Any, moe_runner_config: Any, quant_method: Any) -> Any:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.runtime_context import get_parallel

    from baige_device.engines.sglang.dispatchers import LocalDispatcher, TokenDispatcher

    _refuse_unknown_layer(moe_runner_config, quant_method)
    backend = get_moe_a2a_backend()
    if backend.is_none():
        return LocalDispatcher(moe_runner_config, current().ops)
    if backend.value != ALL_TO_ALL:
        raise MountError(f"sglang: --moe-a2a-backend: expected none or {ALL_TO_ALL}, got {backend.value}")
    return TokenDispatcher(moe_runner_config, current().ops, get_parallel().moe_ep_group)


def _moe_class(original: Any, quant_config: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return FusedMoE


def _refuse_unknown_layer(config: Any, quant_method: Any) -> None:
    """Refuse when the model is built what the ops would compute otherwise than SGLang."""
    where = f"sglang: MoE layer {config.layer_id}"
    remedy = "BAIGE_OPS=moe_dispatch=off leaves MoE to SGLang"
    if type(quant_method).__name__ != "UnquantizedFusedMoEMethod":
        raise MountError(f"{where}: expected unquantised experts, got {type(quant_method).__name__}; {remedy}")
    if config.activation not in ACTIVATIONS or not config.is_gated:
        raise MountError(
            f"{where}: activation: expected gated {' or '.join(ACTIVATIONS)}, got {config.activation} "
            f"(gated {config.is_gated}); {remedy}"
        )
    options = ("apply_router_weight_on_input", "no_combine", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
    given = [name for name in options if getattr(config, name, None)]
    if quant_method.with_bias:
        given.append("bias")
    if given:
        raise MountError(f"{where}: {', '.join(given)}: not served by moe_expert_ffn; {remedy}")
