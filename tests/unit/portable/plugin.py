"""A backend that offers the portable tier on CPU tensors, for Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Callable

from baige_device.backends.portable import offers
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import DeviceInfo, Offer, Probe

__all__ = ["InterpretedPlugin"]

_OPS = (
    "quantize_blocks",
    "dequantize_blocks",
    "attend_paged",
    "sparse_attention",
    "merge_attention",
    "index_topk",
    "kv_write",
    "moe_dispatch",
    "moe_expert_ffn",
    "moe_combine",
)


def _hook(op: str) -> Callable[[DeviceInfo], Offer]:
    def hook(device: DeviceInfo) -> Offer:
        offer: Offer = getattr(offers, op)(device)
        return offer

    return hookimpl(hook)


class InterpretedPlugin:
    """The portable tier as a chip of its own; its name in discovery is up to the caller."""

    @staticmethod
    @hookimpl
    def baige_probe() -> Probe:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        reason = "Triton's interpreter" if interpreted else "TRITON_INTERPRET is not 1"
        return Probe(interpreted, reason, "cpu", "interpreter")


for _op in _OPS:
    setattr(InterpretedPlugin, _op, staticmethod(_hook(_op)))
PLUGIN = InterpretedPlugin
