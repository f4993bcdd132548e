"""What the CUDA backend offers, op by op. Importing this module loads neither torch nor any vendor library."""

from __future__ import annotations

from baige_device.backends.cuda import attention_offers, gather_offers, moe_offers, probe, weight_offers
from baige_device.backends.portable import offers
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import DeviceInfo, Offer, Probe, Verdict


@hookimpl
def baige_hardware() -> Verdict:
    return probe.hardware()


@hookimpl
def baige_probe() -> Probe:
    return probe.probe()


@hookimpl
def host_alloc(device: DeviceInfo) -> list[Offer]:
    return gather_offers.host_alloc(device)


@hookimpl
def uva_sparse_gather(device: DeviceInfo) -> Offer:
    return gather_offers.uva_sparse_gather(device)


@hookimpl
def uva_sparse_scatter(device: DeviceInfo) -> Offer:
    return gather_offers.uva_sparse_scatter(device)


@hookimpl
def hot_cache_resolve(device: DeviceInfo) -> Offer:
    return gather_offers.hot_cache_resolve(device)


@hookimpl
def quantize_blocks(device: DeviceInfo) -> list[Offer]:
    return [offers.quantize_blocks(device)]


@hookimpl
def dequantize_blocks(device: DeviceInfo) -> list[Offer]:
    return [offers.dequantize_blocks(device)]


@hookimpl
def fp8_all_gather(device: DeviceInfo) -> Offer:
    return weight_offers.fp8_all_gather(device)


@hookimpl
def attend_paged(device: DeviceInfo) -> list[Offer]:
    return [*attention_offers.attend_paged(device), offers.attend_paged(device)]


@hookimpl
def sparse_attention(device: DeviceInfo) -> list[Offer]:
    return [*attention_offers.sparse_attention(device), offers.sparse_attention(device)]


@hookimpl
def merge_attention(device: DeviceInfo) -> list[Offer]:
    return [offers.merge_attention(device)]


@hookimpl
def index_topk(device: DeviceInfo) -> list[Offer]:
    return [*attention_offers.index_topk(device), offers.index_topk(device)]


@hookimpl
def kv_write(device: DeviceInfo) -> list[Offer]:
    return [offers.kv_write(device)]


@hookimpl
def moe_dispatch(device: DeviceInfo) -> list[Offer]:
    return [*moe_offers.moe_dispatch(device), offers.moe_dispatch(device)]


@hookimpl
def moe_expert_ffn(device: DeviceInfo) -> list[Offer]:
    return [offers.moe_expert_ffn(device)]


@hookimpl
def moe_combine(device: DeviceInfo) -> list[Offer]:
    return [offers.moe_combine(device)]
