"""What the reference backend offers: all ops, all layouts, the `reference` tier."""

from __future__ import annotations

import importlib.util

from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import DeviceInfo, Offer, Probe, Tier, Verdict


@hookimpl
def baige_hardware() -> Verdict:
    return Verdict.yes("needs no hardware")


@hookimpl
def baige_probe() -> Probe:
    if importlib.util.find_spec("torch") is None:
        return Probe(False, "torch is not installed; the host engine or the chip's software brings it")
    return Probe(True, "plain torch", "cpu", "cpu (reference)")


def _offer(op: str, **facts: object) -> Offer:
    return Offer(f"baige_device.ops.{op}.reference:{op}", Tier.REFERENCE, facts=facts)


@hookimpl
def host_alloc(device: DeviceInfo) -> Offer:
    return _offer("host_alloc")


@hookimpl
def uva_sparse_gather(device: DeviceInfo) -> Offer:
    return _offer("uva_sparse_gather")


@hookimpl
def uva_sparse_scatter(device: DeviceInfo) -> Offer:
    return _offer("uva_sparse_scatter")


@hookimpl
def hot_cache_resolve(device: DeviceInfo) -> Offer:
    return _offer("hot_cache_resolve", eviction="lru")


@hookimpl
def quantize_blocks(device: DeviceInfo) -> Offer:
    return _offer("quantize_blocks", wire_formats=("fp8_e4m3", "int8_absmax", "bf16"))


@hookimpl
def dequantize_blocks(device: DeviceInfo) -> Offer:
    return _offer("dequantize_blocks", wire_formats=("fp8_e4m3", "int8_absmax", "bf16"))


@hookimpl
def fp8_all_gather(device: DeviceInfo) -> Offer:
    return _offer("fp8_all_gather", transports=("torch.distributed",))


@hookimpl
def attend_paged(device: DeviceInfo) -> Offer:
    return _offer("attend_paged")


@hookimpl
def sparse_attention(device: DeviceInfo) -> Offer:
    return _offer("sparse_attention", kv_formats=("plain", "fp8_ds_mla"))


@hookimpl
def merge_attention(device: DeviceInfo) -> Offer:
    return _offer("merge_attention")


@hookimpl
def index_topk(device: DeviceInfo) -> Offer:
    return _offer("index_topk")


@hookimpl
def kv_write(device: DeviceInfo) -> Offer:
    return _offer("kv_write")


@hookimpl
def moe_dispatch(device: DeviceInfo) -> Offer:
    return _offer("moe_dispatch", layouts=("flat", "expert_major", "masked"))


@hookimpl
def moe_expert_ffn(device: DeviceInfo) -> Offer:
    return _offer("moe_expert_ffn", layouts=("flat", "expert_major", "masked"))


@hookimpl
def moe_combine(device: DeviceInfo) -> Offer:
    return _offer("moe_combine", layouts=("flat", "expert_major", "masked"))
