"""The CUDA backend's offers for the gather family."""

from __future__ import annotations

from typing import Any

from baige_device.backends.cuda import nvrtc
from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict

__all__ = ["host_alloc", "hot_cache_resolve", "uva_sparse_gather", "uva_sparse_scatter"]

_PACKAGE = "baige_device.backends.cuda"
_OLDEST = (7, 0)

_LINK_BYTES_PER_S: dict[str, float] = {"NVIDIA H200": 54e9}
"""Measured host-to-device copy rate of pinned memory, by card, on PCIe gen5 x16."""


def _compiled(device: DeviceInfo) -> Verdict:
    capability = device.facts.get("compute_capability", (0, 0))
    if tuple(capability) < _OLDEST:
        return Verdict.no(f"needs compute capability >= {_OLDEST[0]}.{_OLDEST[1]}, this card has {capability}")
    return nvrtc.available()


def _link(device: DeviceInfo) -> dict[str, Any]:
    measured = _LINK_BYTES_PER_S.get(device.name)
    return {} if measured is None else {"link_bytes_per_s": measured}


def host_alloc(device: DeviceInfo) -> list[Offer]:
    facts = {"huge_pages": True, "accounts_memlock": False}
    return [
        Offer(f"{_PACKAGE}.managed_memory:host_alloc", Tier.TUNED, facts={**facts, "kind": "managed"}),
        Offer(f"{_PACKAGE}.host_memory:host_alloc", Tier.PORTABLE, facts={**facts, "kind": "pinned"}),
    ]


def uva_sparse_gather(device: DeviceInfo) -> Offer:
    facts = {"graph_capturable": True, "max_sms": 8, **_link(device)}
    return Offer(f"{_PACKAGE}.gather:uva_sparse_gather", Tier.TUNED, available=_compiled(device), facts=facts)


def uva_sparse_scatter(device: DeviceInfo) -> Offer:
    facts = {"graph_capturable": True, "max_sms": 8, **_link(device)}
    return Offer(f"{_PACKAGE}.gather:uva_sparse_scatter", Tier.TUNED, available=_compiled(device), facts=facts)


def hot_cache_resolve(device: DeviceInfo) -> Offer:
    return Offer(
        f"{_PACKAGE}.resolve:hot_cache_resolve",
        Tier.TUNED,
        supports=_resolve_supports,
        available=_compiled(device),
        facts={"graph_capturable": True, "eviction": "lru"},
    )


def _resolve_supports(need: Need) -> Verdict:
    slots = need.params.get("hot_slots", 0)
    if slots > 1 << 20:
        return Verdict.no(f"caches of up to {1 << 20} slots, asked for {slots}")
    return Verdict.yes()
