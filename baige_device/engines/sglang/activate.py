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

from baige_device.engines.sglang.compat import WINDOW
from baige_device.errors import BackendError, BaigeError, MountError
from baige_device.registry.choice import choose
from baige_device.registry.manager import BUILT_IN, sources
from baige_device.settings import load_settings

__all__ = ["ENTRY_POINT", "mount", "platform_backend", "platform_path"]

logger = logging.getLogger("baige_device")

ENTRY_POINT = "baige"
"""Our name in SGLang's platform group, the value for SGLANG_PLATFORM."""
_PLATFORM = "baige_device.engines.sglang.platform:BaigePlatform"
_GROUP = "sglang.srt.platforms"
T = TypeVar("T")


def platform_path() -> str | None:
    """The platform's `module:Class`, or None when SGLang's own platform (or another plugin's) shall run."""
    return _loudly(_platform_path)


def mount() -> None:
    """Mount into this process: everything on our platform, the name of our attention backend elsewhere."""
    _loudly(_mount)


def platform_backend() -> str | None:
    """The backend whose platform we provide: `reference` when it is asked for by name, or an outside chip that is
    named or found. Never for CUDA, whose optimisations mount into SGLang's own platform; Kunlun's platform joins here.

    Raises:
        BackendError: the named backend is broken or absent, or a chip is in the machine and its plugin is broken.
    """
    name = load_settings().backend
    if name == "reference":
        return name
    if name == "auto":
        outside = [source for source in sources() if source.name not in BUILT_IN]
        # Built-in chips are not probed here: their platforms are not ours, and this runs while SGLang is imported.
        reference = [source for source in sources() if source.name == "reference"]
        chosen = choose("auto", [*outside, *reference]).backend.name if outside else "reference"
        return None if chosen == "reference" else chosen
    return None if name in (*BUILT_IN, "off") else choose(name).backend.name


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
    if others and load_settings().backend == "auto":
        logger.info("platform plugin %s is active; baige-device leaves SGLang's platform to it", others[0])
        return None
    if others:
        raise MountError(
            f"sglang: two plugins want the platform: {ENTRY_POINT!r} (baige-device, BAIGE_BACKEND="
            f"{load_settings().backend}) and {', '.join(others)}; SGLANG_PLATFORM=NAME decides (ours is {ENTRY_POINT}), "
            "BAIGE_BACKEND=off withdraws ours"
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
    try:
        WINDOW.check()
    except MountError as error:
        if load_settings().backend != "auto":
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
    except BaigeError as error:
        logger.critical("baige-device cannot be used", exc_info=True)
        raise SystemExit(f"baige-device: {type(error).__name__}: {error}") from error
