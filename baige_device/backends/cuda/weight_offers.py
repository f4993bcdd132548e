"""The CUDA backend's offer for gathering weights; quantisation is the portable tier's."""

from __future__ import annotations

from baige_device.registry.offers import DeviceInfo, Offer, Tier

__all__ = ["fp8_all_gather"]


def fp8_all_gather(device: DeviceInfo) -> Offer:
    return Offer(
        "baige_device.backends.cuda.all_gather:fp8_all_gather",
        Tier.TUNED,
        facts={
            "transports": ("peer_kernel", "copy_engine", "nccl", "staged"),
            "graph_capturable": True,
            "shard_allocator": "baige_device.backends.cuda.all_gather_memory:allocate_shard",
        },
    )
