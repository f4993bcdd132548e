"""Everything that is mounted when the platform is ours."""

from __future__ import annotations

from typing import Any

from baige_device.engines.sglang import dsa, grammar, hisparse, moe, names
from baige_device.engines.sglang.compat import attention_is_ours, resolved
from baige_device.engines.sglang.hisparse_args import agree
from baige_device.engines.sglang.ledger import (
    CAPABILITY,
    CPU_COLLECTIVES,
    CPU_PINNING,
    DP_MEMCPY,
    INTERNAL_STATE,
    LEDGER,
    LOAD_MODEL,
    OOT_FORWARD,
    RESOLUTION_HOOK,
    hook,
    swapped,
    verify,
)
from baige_device.settings import Settings, load_settings

__all__ = ["install", "verify_worker"]

_ASSUMED_CAPABILITY = (9, 0)
"""What a DSA model's arguments are resolved for; any value of 9 keeps SGLang's bf16 defaults."""


def install() -> None:
    """Mount into this process, once.

    Raises:
        MountError: a target is missing in the installed SGLang.
    """
    if LOAD_MODEL in LEDGER.applied:
        return
    from sglang.srt.platforms import current_platform

    settings = load_settings()
    hook(LOAD_MODEL, _before_load_model, "before")
    hook(INTERNAL_STATE, _after_internal_state, "after")
    _hook_resolution()
    if current_platform.device_type == "cpu":
        _mount_cpu()
    LEDGER.note_seam(OOT_FORWARD)
    dsa.register(names.make_attention)
    hisparse.install(cpu=current_platform.device_type == "cpu")
    if moe.is_ours(settings):
        moe.install()
    if current_platform.masks_in_torch:
        grammar.install()


def verify_worker() -> None:
    """Check in a worker that all of the above is in force.

    Raises:
        MountError: naming what is not.
    """
    from sglang.srt.platforms import current_platform

    verify(features(load_settings(), current_platform))


def features(settings: Settings, platform: Any) -> list[str]:
    """The ledger's features that `install` applies."""
    wanted = ["names", "platform", "hisparse"]
    if platform.device_type == "cpu":
        wanted += ["cpu", "hisparse_cpu"]
    if moe.is_ours(settings):
        wanted.append("moe")
    if platform.masks_in_torch:
        wanted.append("grammar")
    return wanted


def _before_load_model(runner: Any) -> None:
    from baige_device.engines.sglang.worker import activate_worker

    verify_worker()
    settings = load_settings()
    activate_worker(runner, attention=attention_is_ours(settings), experts=moe.is_ours(settings))


def _after_internal_state(output: Any, scheduler: Any, request: Any) -> None:
    from baige_device.activation import current

    activation = current()
    output.internal_state["baige_device"] = {
        "record": activation.record.as_dict(),
        "calls": activation.ops.calls(),
        "hisparse": hisparse.report(scheduler.tp_worker.model_runner),
    }


def _hook_resolution() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    LEDGER.note_seam(RESOLUTION_HOOK)
    register_resolution_hook("handle_cpu_backends")(_resolve_cpu)
    register_resolution_hook("handle_model_specific_adjustments")(_resolve_model)


def _resolve_cpu(server_args: Any, previous: Any) -> None:
    """Replaces the step: the attention backend is left to `get_default_attention_backend`."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if resolved(server_args).device == "cpu":
        declare_resolution(server_args, "baige_device", sampling_backend="pytorch")


def _resolve_model(server_args: Any, previous: Any) -> None:
    import torch

    _agree_on_hisparse(server_args)
    if torch.cuda.is_available():  # also what a chip says that presents itself as CUDA
        previous(server_args)
    else:
        with swapped(CAPABILITY, lambda device=None: _ASSUMED_CAPABILITY):
            previous(server_args)
    dsa.keep_model_dtype(server_args)


def _agree_on_hisparse(server_args: Any) -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolved(server_args)
    settings = load_settings().hisparse
    if settings != type(settings)() or args.enable_hisparse:
        declare_resolution(server_args, "baige_device", **agree(settings, args, model_config_of(server_args)))


def _mount_cpu() -> None:
    from sglang.srt.layers.dp_attention import memcpy_cpu

    LEDGER.patch(CPU_COLLECTIVES, lambda original: True)
    LEDGER.patch(CPU_PINNING, lambda original: True)
    LEDGER.patch(DP_MEMCPY, lambda original: memcpy_cpu)
