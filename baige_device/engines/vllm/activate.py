"""What the two entry points of vLLM do: answer for the platform, and register our names in every process."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

from baige_device.engines.chips import defers, describe, gets_our_platform, worth_probing
from baige_device.engines.vllm.compat import WINDOW
from baige_device.errors import MountError
from baige_device.registry.choice import Chosen, choose
from baige_device.registry.manager import BUILT_IN
from baige_device.settings import Settings, load_settings

__all__ = ["describe_platform", "mount", "platform_path"]

logger = logging.getLogger("baige_device")

PLATFORM = "baige_device.engines.vllm.platform.BaigePlatform"
CHIP_PLATFORM = "baige_device.engines.vllm.chip.ChipPlatform"
GROUP = "vllm.platform_plugins"

_failure: Exception | None = None
_asking_others = False


def platform_path() -> str | None:
    """The dotted path of our platform class, or None when the platform is not ours to provide.

    Ours are the reference backend when it is asked for by name, Kunlun unless another plugin provides its platform, and
    chips from outside whose tensors are host tensors.
    The host logs an exception of a platform plugin and goes on without it, so an exception is kept and raised by
    `mount`, which the host does not guard.
    """
    global _failure
    _failure = None
    try:
        return _platform_path(load_settings())
    except Exception as error:
        _failure = error
        return None


def describe_platform() -> str:
    """Whose platform vLLM gets from the plugins that are installed, for `doctor`. Asks them all, as vLLM does.

    Raises:
        BaigeError: what would stop the start.
    """
    return describe(_platform_path(load_settings()), _other_platforms())


def mount() -> None:
    """Register our attention backends by name, and on our own platform what every process needs. Idempotent.

    Raises:
        MountError: the platform could not be provided although it was asked for, or vLLM is outside the window.
        SettingsError: a bad setting.
    """
    from vllm.platforms import current_platform  # asks `platform_path`, when nobody has yet

    if _failure is not None:
        raise MountError(f"vllm: baige-device cannot provide the platform: {_failure}") from _failure
    settings = load_settings()
    if not settings.enabled:  # by the TOML file; the environment's `off` never comes here
        return
    try:
        WINDOW.check()
    except MountError as error:
        if settings.backend != "auto":
            raise
        logger.warning("%s; baige-device mounts nothing", error)
        return
    from baige_device.engines.vllm.names import register_names

    register_names()
    if type(current_platform).__module__ == PLATFORM.rpartition(".")[0]:
        from baige_device.engines.vllm.mount_platform import mount_process

        mount_process()
    elif current_platform.is_cuda() and settings.backend in ("auto", "cuda"):
        from baige_device.engines.vllm.cuda_mount import mount_cuda

        mount_cuda(settings)
    else:
        logger.debug("vllm: attention backends registered by name; nothing else is mounted in process %d", os.getpid())


def _platform_path(settings: Settings) -> str | None:
    chosen = _chosen(settings.backend)
    if chosen is None:
        return None
    WINDOW.check()
    others = _other_platforms()
    if others and defers(settings.backend, chosen.backend.name):
        logger.info(
            "vllm: platform plugin %s is active; baige-device (backend %s) leaves the platform to it and mounts "
            "through the general plugin only",
            others[0],
            chosen.backend.name,
        )
        return None
    if others:
        raise MountError(
            f"vllm: two platform plugins want the platform: baige (baige-device, BAIGE_BACKEND={settings.backend}) and "
            f"{', '.join(others)}; name one in VLLM_PLUGINS (for ours: VLLM_PLUGINS=baige,baige_mounts), or set "
            "BAIGE_BACKEND=off"
        )
    return PLATFORM if chosen.device.torch_device == "cpu" else CHIP_PLATFORM


def _chosen(asked: str) -> Chosen | None:
    """The backend that gets its platform from us, or None."""
    if asked == "off" or (asked == "auto" and not worth_probing()):
        return None
    if asked != "auto" and not gets_our_platform(asked):
        return None
    chosen = choose(asked)
    if asked == "auto" and (chosen.backend.name == "reference" or not gets_our_platform(chosen.backend.name)):
        return None
    if chosen.device.torch_device != "cpu" and chosen.backend.name not in BUILT_IN:
        raise MountError(
            f"vllm: backend {chosen.backend.name!r} has tensors on {chosen.device.torch_device!r}; install the chip's "
            "own vLLM platform plugin beside baige-device (our platform serves host tensors)"
        )
    return chosen


def _other_platforms() -> list[str]:
    """`NAME (DISTRIBUTION)` of every other platform plugin that the host would activate."""
    global _asking_others
    if _asking_others:
        return []
    allowed = os.environ.get("VLLM_PLUGINS")
    _asking_others = True
    try:
        return [
            f"{point.name} ({point.dist.name if point.dist else 'unknown distribution'})"
            for point in entry_points(group=GROUP)
            if not point.value.startswith("baige_device.")
            and (allowed is None or point.name in allowed.split(","))
            and _answers(point.load)
        ]
    finally:
        _asking_others = False


def _answers(load: object) -> bool:
    try:
        return load()() is not None  # type: ignore[operator]
    except Exception:  # the host treats a failing plugin as absent, too
        return False
