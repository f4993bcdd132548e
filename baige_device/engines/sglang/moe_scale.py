"""Who multiplies the routed experts' sum by the model's `routed_scaling_factor`: SGLang's MoE runner, or its model.

Without an all-to-all, SGLang's Triton runner multiplies. Some models count on it everywhere; the others only where
SGLang sees CUDA, and multiply themselves elsewhere. Behind an all-to-all no runner multiplies, and only some models do.
Our ops stand in for the runner, so they multiply where it would. A layer cannot see the block that owns it, and nothing
in SGLang says what a block does, hence the table below.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from baige_device.errors import MountError

__all__ = ["BLOCKS", "Block", "bind_scales", "first_scale", "runner_scale"]

_MODELS = "sglang.srt.models."


class Block(NamedTuple):
    """Where the forward of a model's MoE block multiplies."""

    without_cuda: bool
    """Without an all-to-all, where SGLang sees no CUDA. Where it sees CUDA, every block leaves it to the runner."""
    all_to_all: bool


BLOCKS: dict[str, Block] = {
    "deepseek_v2.DeepseekV2MoE": Block(without_cuda=True, all_to_all=True),
    "glm4_moe.Glm4MoeSparseMoeBlock": Block(without_cuda=True, all_to_all=True),
    "glm4_moe_lite.Glm4MoeLiteSparseMoeBlock": Block(without_cuda=True, all_to_all=True),
    "bailing_moe_v3.BailingMoE": Block(without_cuda=False, all_to_all=True),
    "bailing_moe.BailingMoESparseMoeBlock": Block(without_cuda=False, all_to_all=False),
    "bailing_moe_linear.BailingMoE": Block(without_cuda=False, all_to_all=False),
    "kimi_linear.KimiMoE": Block(without_cuda=False, all_to_all=False),
    "llada2.LLaDA2MoeSparseMoeBlock": Block(without_cuda=False, all_to_all=False),
}
"""Classes below `sglang.srt.models` that give their experts a factor and whose experts our ops compute, as of 0.5.23.
The engine tests run each of them in the installed SGLang."""


def first_scale(factor: float | None) -> float | None:
    """What a new dispatcher multiplies router weights by; None until `bind_scales` knows the block."""
    return 1.0 if factor is None or factor == 1.0 else None


def bind_scales(model: Any) -> None:
    """Tell every dispatcher of ours in a loaded model what to multiply router weights by.

    Raises:
        MountError: a layer with a factor of which it is not known who multiplies.
    """
    from sglang.srt.utils import is_cuda

    from baige_device.engines.sglang.dispatchers import LocalDispatcher, TokenDispatcher

    for name, block in model.named_modules():
        for layer in block.children():
            dispatcher = getattr(layer, "dispatcher", None)
            if isinstance(dispatcher, (LocalDispatcher, TokenDispatcher)) and dispatcher.scale is None:
                factor = float(layer.moe_runner_config.routed_scaling_factor)
                where = f"sglang: {name or 'the model'}: routed_scaling_factor {factor}"
                _refuse_other_routing(where, layer)
                all_to_all = isinstance(dispatcher, TokenDispatcher)
                dispatcher.scale = runner_scale(where, type(block), factor, cuda=is_cuda(), all_to_all=all_to_all)


def runner_scale(where: str, block: type, factor: float, *, cuda: bool, all_to_all: bool) -> float:
    """What SGLang's runner would multiply by in this block: the factor, or 1 where the block itself does.

    Raises:
        MountError: the block is not in `BLOCKS`, or nobody would multiply.
    """
    path = f"{block.__module__}.{block.__qualname__}"
    rule = BLOCKS.get(path.removeprefix(_MODELS)) if path.startswith(_MODELS) else None
    remedy = "BAIGE_OPS=moe_dispatch=off leaves MoE to SGLang"
    if rule is None:
        raise MountError(f"{where}: expected a block of which it is known whether it multiplies, got {path}; {remedy}")
    if not all_to_all:
        return 1.0 if rule.without_cuda and not cuda else factor
    if not rule.all_to_all:
        raise MountError(f"{where}: with --moe-a2a-backend nobody multiplies in {path}; expected none")
    return 1.0


def _refuse_other_routing(where: str, layer: Any) -> None:
    """Refuse where the top-k may multiply, or a block asks for more than CUDA."""
    from sglang.srt.utils import get_bool_env_var, is_hip, is_musa, is_xpu

    if layer.should_fuse_routed_scaling_factor_in_topk:
        raise MountError(f"{where}: --moe-runner-backend moves it into the top-k; expected auto")
    if is_hip() and get_bool_env_var("SGLANG_USE_AITER"):
        raise MountError(f"{where}: SGLANG_USE_AITER moves it into the top-k; expected 0")
    if is_musa() or is_xpu():
        raise MountError(f"{where}: SGLang sees MUSA or XPU, where its blocks differ; expected CUDA or neither")
