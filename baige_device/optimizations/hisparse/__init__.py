"""HiSparse offload: a small hot KV buffer on the device, all KV in host memory, missing rows swapped in each step.

Names are loaded on first use, so that sizes can be checked where torch is not installed (`doctor`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baige_device.optimizations.hisparse.cache import HotKVCache
    from baige_device.optimizations.hisparse.config import HiSparseConfig
    from baige_device.optimizations.hisparse.metrics import HiSparseMetrics
    from baige_device.optimizations.hisparse.plan import HiSparseFacts, HiSparsePlan, plan_hisparse
    from baige_device.optimizations.hisparse.swap import SwapIn

__all__ = [
    "HiSparseConfig",
    "HiSparseFacts",
    "HiSparseMetrics",
    "HiSparsePlan",
    "HotKVCache",
    "SwapIn",
    "plan_hisparse",
]

_HOMES = {
    "HiSparseConfig": "config",
    "HiSparseFacts": "plan",
    "HiSparseMetrics": "metrics",
    "HiSparsePlan": "plan",
    "HotKVCache": "cache",
    "SwapIn": "swap",
    "plan_hisparse": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
