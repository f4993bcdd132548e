"""The extension surface of baige-device, all of it: a table of contents in one flat file.

A backend is a module or object with functions marked `@hookimpl` and named like the hooks below. It is found by the
entry point group `baige_device.backends`; the entry point's name is the backend's name. The first two hooks say
whether the chip is here, the third adds rows to `doctor`; every other hook is one op. An op hook gets the probed device
and returns an `Offer`, several offers of different tiers, or None when the backend has nothing for that op. pluggy runs
at activation only.

The semantics of each op (shapes, dtypes, padding, errors, cost) are in `baige_device/ops/<op>/contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pluggy

from baige_device.registry.offers import DeviceInfo, Finding, Offer, Probe, Verdict

__all__ = ["PROJECT", "ENTRY_POINT_GROUP", "hookimpl", "hookspec"]

PROJECT = "baige_device"
ENTRY_POINT_GROUP = "baige_device.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Offers: TypeAlias = Offer | Sequence[Offer] | None


@hookspec
def baige_hardware() -> Verdict:  # type: ignore[empty-body]
    """Is hardware of this chip in the machine? Looks at device nodes only; loads no vendor library.

    It decides how loud a failing probe is: with the hardware there it stops the start, without it is a debug line. A
    backend that cannot say (no such hook, or a broken plugin) is a warning.
    """


@hookspec
def baige_probe() -> Probe:  # type: ignore[empty-body]
    """Is this chip usable in this process, and with which measured or documented facts? May load vendor libraries."""


@hookspec
def baige_findings(device: DeviceInfo) -> Sequence[Finding]:  # type: ignore[empty-body]
    """Rows for `doctor`: what only the hardware can settle, how it was settled here, and what it decides. Optional."""


@hookspec
def host_alloc(device: DeviceInfo) -> Offers:
    """Allocate host memory that the device can address: staying there, mapped, exactly sized, within the limits."""


@hookspec
def uva_sparse_gather(device: DeviceInfo) -> Offers:
    """Copy scattered rows of a host pool into scattered rows of a device pool; device-side count, -1 is empty."""


@hookspec
def uva_sparse_scatter(device: DeviceInfo) -> Offers:
    """Copy scattered rows of a device pool into scattered rows of a host pool."""


@hookspec
def hot_cache_resolve(device: DeviceInfo) -> Offers:
    """Map wanted keys to slots of a small hot cache (LRU) and emit the compact plan of the misses to be copied."""


@hookspec
def quantize_blocks(device: DeviceInfo) -> Offers:
    """Quantise a weight block-wise into a wire format: one-byte payload plus one scale a block."""


@hookspec
def dequantize_blocks(device: DeviceInfo) -> Offers:
    """Turn a block-quantised weight back into bf16, fp16 or fp32."""


@hookspec
def fp8_all_gather(device: DeviceInfo) -> Offers:
    """Gather the byte image of one layer's weight shards from all ranks, asynchronously, into a fixed buffer."""


@hookspec
def attend_paged(device: DeviceInfo) -> Offers:
    """Dense attention over a paged KV cache: GQA and MLA, causal, sliding window; returns output and LSE."""


@hookspec
def sparse_attention(device: DeviceInfo) -> Offers:
    """Attention of each query over its own list of KV rows, per kv head, with an optional second set; returns LSE."""


@hookspec
def merge_attention(device: DeviceInfo) -> Offers:
    """Merge two partial attention results over disjoint KV sets by their log-sum-exp."""


@hookspec
def index_topk(device: DeviceInfo) -> Offers:
    """DSA indexer: score every visible key of a paged index cache and return the positions of the K best."""


@hookspec
def kv_write(device: DeviceInfo) -> Offers:
    """Write new K or V (or latent) rows into the slots of a paged cache; slot -1 writes nothing."""


@hookspec
def moe_dispatch(device: DeviceInfo) -> Offers:
    """Send tokens to the ranks of their experts, in a flat, expert-major or masked layout; returns an opaque handle."""


@hookspec
def moe_expert_ffn(device: DeviceInfo) -> Offers:
    """Gated feed-forward of the local experts over a dispatched batch of any layout."""


@hookspec
def moe_combine(device: DeviceInfo) -> Offers:
    """Bring expert outputs back to the tokens' ranks and reduce them with the router weights."""
