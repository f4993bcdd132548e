"""The portable tier: what any chip with a Triton compiler may offer from its plugin, one function an op.

A backend's op hook returns `offers.<op>(device)` beside or instead of its own kernels. Nothing is imported here until
an offer is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from baige_device.registry.offers import DeviceInfo, Offer, Tier, Verdict

__all__ = [
    "attend_paged",
    "dequantize_blocks",
    "index_topk",
    "kv_write",
    "merge_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_expert_ffn",
    "quantize_blocks",
    "sparse_attention",
]

_PACKAGE = "baige_device.backends.portable"


def triton_available() -> Verdict:
    """Whether Triton can be imported here."""
    if importlib.util.find_spec("triton") is None:
        return Verdict.no("Triton is not installed")
    return Verdict.yes()


def quantize_blocks(device: DeviceInfo) -> Offer:
    return Offer(
        f"{_PACKAGE}.quantize:quantize_blocks",
        Tier.PORTABLE,
        available=triton_available(),
        facts={"wire_formats": ("fp8_e4m3", "int8_absmax", "bf16"), "graph_capturable": False},
    )


def dequantize_blocks(device: DeviceInfo) -> Offer:
    return Offer(
        f"{_PACKAGE}.dequantize:dequantize_blocks",
        Tier.PORTABLE,
        available=triton_available(),
        facts={"wire_formats": ("fp8_e4m3", "int8_absmax", "bf16"), "graph_capturable": True},
    )


def attend_paged(device: DeviceInfo) -> Offer:
    return _attention("attend_paged")


def sparse_attention(device: DeviceInfo) -> Offer:
    return _attention("sparse_attention", kv_formats=("plain", "fp8_ds_mla"))


def merge_attention(device: DeviceInfo) -> Offer:
    return _attention("merge_attention")


def index_topk(device: DeviceInfo) -> Offer:
    return _attention("index_topk")


def kv_write(device: DeviceInfo) -> Offer:
    return _attention("kv_write")


def moe_dispatch(device: DeviceInfo) -> Offer:
    return _moe("moe_dispatch")


def moe_expert_ffn(device: DeviceInfo) -> Offer:
    return _moe("moe_expert_ffn")


def moe_combine(device: DeviceInfo) -> Offer:
    return _moe("moe_combine")


def _attention(op: str, **facts: object) -> Offer:
    found: Mapping[str, object] = {"graph_capturable": True, **facts}
    return Offer(f"{_PACKAGE}.{op}:{op}", Tier.PORTABLE, available=triton_available(), facts=found)


def _moe(op: str) -> Offer:
    facts = {"layouts": ("flat", "expert_major", "masked"), "graph_capturable": True}
    return Offer(f"{_PACKAGE}.{op}:{op}", Tier.PORTABLE, available=triton_available(), facts=facts)
