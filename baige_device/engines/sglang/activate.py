"""What SGLang's two entry points do: who provides the platform, and what is mounted into this process.

SGLang logs the exceptions of plugins and goes on, as CUDA or without the mount: a silent fall back. `SystemExit` is not
caught by it, so that is what an error of ours becomes, with its cause in the log.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from baige_device.engines.chips import defers, describe, gets_our_platform, worth_probing
from baige_device.engines.sglang.compat import WINDOW
from baige_device.errors import BackendError, MountError
from baige_device.registry.choice import choose
from baige_device.registry.manager import sources
from baige_device.settings import load_settings

__all__ = ["ENTRY_POINT", "describe_platform", "mount", "platform_backend", "platform_path"]

logger = logging.getLogger("baige_device")

ENTRY_POINT = "baige"
"""Our name in SGLang's platform group, the value for SGLANG_PLATFORM."""
_PLATFORM = "baige_device.engines.sglang.platform:BaigePlatform"
_GROUP = "sglang.srt.platforms"
T = TypeVar("T")


def platform_path() -> str | None:
    """The platform's `module:Class`, or None when SGLang's own platform (or another plugin's) shall run."""
    return _loudly(_platform_path)


def describe_platform() -> str:
    """Whose platform SGLang gets from the plugins that are installed, for `doctor`. Asks them all, as SGLang does.

    Raises:
        BaigeError: what would stop the start.
    """
    named = os.environ.get("SGLANG_PLATFORM", ENTRY_POINT)
    if named != ENTRY_POINT:
        return describe(None, [f"{named!r} (SGLANG_PLATFORM)"])
    return describe(_platform_path(), _other_platforms())


def mount() -> None:
    """Mount into this process: everything on our platform, the name of our attention backend elsewhere."""
    _loudly(_mount)


def platform_backend() -> str | None:
    """The backend whose platform we provide: `reference` when it is asked for by name, Kunlun, or an outside chip that
    is named or found. Never for CUDA, whose optimisations mount into SGLang's own platform.

    Raises:
        BackendError: the named backend is broken or absent, or a chip is in the machine and its plugin is broken.
    """
    name = load_settings().backend
    if name == "auto" and worth_probing():
        # CUDA is not probed: its platform is not ours, and this runs while SGLang is imported.
        found = choose(name, [source for source in sources() if gets_our_platform(source.name)]).backend.name
        return None if found == "reference" else found
    if name in ("auto", "off") or not gets_our_platform(name):
        return None
    return name if name == "reference" else choose(name).backend.name


def _platform_path() -> str | None:
    backend = platform_backend()
    if backend is None:
        if os.environ.get("SGLANG_PLATFORM") == ENTRY_POINT:
            raise BackendError(
                f"SGLANG_PLATFORM={ENTRY_POINT} asks for the platform of baige-device, and BAIGE_BACKEND="
                f"{load_settings().backend} gives it no chip; set BAIGE_BACKEND=reference or to a chip's name"
            )
        logger.debug("baige-device provides no platform: no chip of ours, and BAIGE_BACKEND does not ask for reference")
        return None
    WINDOW.check()
    others = _other_platforms()
    if others and defers(load_settings().backend, backend):
        logger.info(
            "platform plugin %s is active; baige-device (backend %s) leaves SGLang's platform to it and mounts "
            "through the general plugin only",
            others[0],
            backend,
        )
        return None
    if others:
        raise MountError(
            f"sglang: two plugins want the platform: {ENTRY_POINT!r} (baige-device, BAIGE_BACKEND="
            f"{load_settings().backend}) and {', '.join(others)}; SGLANG_PLATFORM=NAME decides (for ours "
            f"SGLANG_PLATFORM={ENTRY_POINT}), BAIGE_BACKEND=off withdraws ours"
        )
    return _PLATFORM


def _other_platforms() -> list[str]:
    """`'NAME' (DISTRIBUTION)` of every other platform plugin that SGLang would activate beside ours."""
    if os.environ.get("SGLANG_PLATFORM"):  # one was named, and it is ours: the others are not even imported
        return []
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    return [
        f"{point.name!r} ({point.dist.name if point.dist else 'unknown distribution'})"
        for point in importlib.metadata.entry_points(group=_GROUP)
        if not point.value.startswith("baige_device.") and (not allowed or point.name in allowed) and _answers(point)
    ]


def _answers(point: importlib.metadata.EntryPoint) -> bool:
    try:
        return point.load()() is not None
    except Exception:  # SGLang, too, takes a failing plugin for an absent one
        logger.debug("platform plugin %r fails", point.name, exc_info=True)
        return False


def _mount() -> None:
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
    from baige_device.engines.sglang import names
    from baige_device.engines.sglang.platform import is_ours

    names.register()
    if is_ours():
        from baige_device.engines.sglang import mounts

        mounts.install()
    else:
        logger.debug("baige-device: attention backend %r is registered; nothing else is mounted", names.ATTENTION)


def _loudly(function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:  # whatever it is, SGLang would log it and start without us
        logger.critical("baige-device cannot be used", exc_info=True)
        remedy = "" if "BAIGE_BACKEND=off" in str(error) else " (BAIGE_BACKEND=off starts without baige-device)"
        raise SystemExit(f"baige-device: {type(error).__name__}: {error}{remedy}") from error
