"""Whose platform a backend needs. Shared by both engines; imports neither an engine nor torch."""

from __future__ import annotations

import importlib.util

from baige_device.registry.manager import BUILT_IN, sources

__all__ = ["OWN_PLATFORM", "defers", "describe", "gets_our_platform", "worth_probing"]

OWN_PLATFORM = ("reference", "kunlun")
"""Built-in backends whose platform we provide. CUDA's is the engine's own."""
_RUNTIME_MODULES = {"kunlun": "torch_xmlir"}
"""What is installed wherever a built-in chip of ours can be used; looking for it loads nothing."""


def gets_our_platform(backend: str) -> bool:
    """Whether we provide the platform of this backend: ours, or one from outside."""
    return backend in OWN_PLATFORM or backend not in BUILT_IN


def worth_probing() -> bool:
    """With `BAIGE_BACKEND=auto`: whether a chip that gets its platform from us can be here at all.

    Engines ask for platforms while they are imported, so the usual answer, no, must not load a vendor library.
    """
    outside = any(source.name not in BUILT_IN for source in sources())
    return outside or any(importlib.util.find_spec(module) is not None for module in _RUNTIME_MODULES.values())


def defers(asked: str, found: str) -> bool:
    """Whether our platform gives way to another active one instead of refusing the start.

    `asked` is the setting, `found` the backend. It does when nobody asked for ours by name, and for Kunlun always: its
    vendor's platform plugins (vllm-kunlun, sglang-kunlun) and our ops are made to run side by side.
    """
    return asked == "auto" or found == "kunlun"


def describe(ours: str | None, others: list[str]) -> str:
    """Whose platform an engine gets, in `doctor`'s words: ours, that of one of the `others`, or the engine's own."""
    if ours is not None:
        return f"baige-device ({ours})"
    if others:
        return f"{' and '.join(others)}; baige-device mounts through the general plugin only"
    return "the engine's own; baige-device mounts through the general plugin only"
