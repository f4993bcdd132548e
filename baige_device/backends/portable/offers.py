"""The portable tier: what any chip with a Triton compiler may offer from its plugin, one function an op.

A backend's op hook returns `offers.<op>(device)` beside or instead of its own kernels. Nothing is imported here until
an offer is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict

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
    return _moe("moe_dispatch", _captured_on_one_rank)


def moe_expert_ffn(device: DeviceInfo) -> Offer:
    return _moe("moe_expert_ffn", _any)


def moe_combine(device: DeviceInfo) -> Offer:
    return _moe("moe_combine", _captured_on_one_rank)


def _attention(op: str, **facts: object) -> Offer:
    found: Mapping[str, object] = {"graph_capturable": True, **facts}
    return Offer(f"{_PACKAGE}.{op}:{op}", Tier.PORTABLE, available=triton_available(), facts=found)


def _moe(op: str, supports: Callable[[Need], Verdict]) -> Offer:
    facts = {"layouts": ("flat", "expert_major", "masked"), "graph_capturable": "one rank"}
    return Offer(f"{_PACKAGE}.{op}:{op}", Tier.PORTABLE, supports, triton_available(), facts)


def _any(need: Need) -> Verdict:
    return Verdict.yes()


def _captured_on_one_rank(need: Need) -> Verdict:
    if need.params.get("graph") and need.params.get("ranks", 1) > 1:
        return Verdict.no(
            "between ranks the row counts are read on the host, so the call cannot be captured in a graph"
        )
    return Verdict.yes()
