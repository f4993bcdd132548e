"""baige-device: a hardware-abstraction device-plugin layer for LLM inference.

Ops are defined once in a pluggy registry, a chip implements them in one folder, every optimisation is written once
against the ops, and thin mounts put it into vLLM and SGLang through their own plugin entry points.

Importing this package imports no torch and opens no device; names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from baige_device._version import __version__

if TYPE_CHECKING:
    from baige_device.activation import Activation, activate, current, deactivate
    from baige_device.registry.hookspecs import hookimpl
    from baige_device.registry.offers import DeviceInfo, Need, Offer, Probe, Tier, Verdict
    from baige_device.settings import Settings, load_settings

_EXPORTS = {
    "Activation": "baige_device.activation",
    "activate": "baige_device.activation",
    "current": "baige_device.activation",
    "deactivate": "baige_device.activation",
    "hookimpl": "baige_device.registry.hookspecs",
    "DeviceInfo": "baige_device.registry.offers",
    "Need": "baige_device.registry.offers",
    "Offer": "baige_device.registry.offers",
    "Probe": "baige_device.registry.offers",
    "Tier": "baige_device.registry.offers",
    "Verdict": "baige_device.registry.offers",
    "Settings": "baige_device.settings",
    "load_settings": "baige_device.settings",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
