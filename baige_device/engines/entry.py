"""The entry points that vLLM and SGLang call. With `BAIGE_BACKEND=off` nothing else of baige-device is imported.

Hosts may call each function several times in a process and in every process they start; all are idempotent.
"""

from __future__ import annotations

import os

__all__ = ["sglang_general", "sglang_platform", "vllm_general", "vllm_platform"]


def _off() -> bool:
    return os.environ.get("BAIGE_BACKEND", "").strip() == "off"


def vllm_platform() -> str | None:
    """`vllm.platform_plugins`: the platform's dotted class path, or None when the platform is not ours to provide."""
    if _off():
        return None
    from baige_device.engines.vllm.activate import platform_path

    return platform_path()


def vllm_general() -> None:
    """`vllm.general_plugins`: mount what the settings ask for into this process."""
    if _off():
        return
    from baige_device.engines.vllm.activate import mount

    mount()


def sglang_platform() -> str | None:
    """`sglang.srt.platforms`: `"module:Class"`, or None when the platform is not ours to provide."""
    if _off():
        return None
    from baige_device.engines.sglang.activate import platform_path

    return platform_path()


def sglang_general() -> None:
    """`sglang.srt.plugins`: mount what the settings ask for into this process."""
    if _off():
        return
    from baige_device.engines.sglang.activate import mount

    mount()
