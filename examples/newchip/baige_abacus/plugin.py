"""What the abacus chip offers. Light: it is imported wherever this package is installed."""

from __future__ import annotations

import os
from pathlib import Path

from baige_device import DeviceInfo, Need, Offer, Probe, Tier, Verdict, hookimpl

DEVICE_NODE = Path("/dev/abacus0")
DTYPES = ("bfloat16", "float16", "float32")


@hookimpl
def baige_hardware() -> Verdict:
    return Verdict.yes() if DEVICE_NODE.exists() else Verdict.no(f"{DEVICE_NODE} does not exist")


@hookimpl
def baige_probe() -> Probe:
    if os.environ.get("ABACUS_SIMULATE") == "1":
        return Probe(True, "simulated on CPU tensors (ABACUS_SIMULATE=1)", "cpu", "abacus (simulated)")
    found = DEVICE_NODE.exists()
    return Probe(found, f"{DEVICE_NODE} {'exists' if found else 'does not exist'}", "cpu", "abacus")


def _floats_only(need: Need) -> Verdict:
    dtype = need.params.get("dtype", DTYPES[0])
    return Verdict.yes() if dtype in DTYPES else Verdict.no(f"dtype {dtype} is not built; built: {', '.join(DTYPES)}")


@hookimpl
def kv_write(device: DeviceInfo) -> Offer:
    return Offer("baige_abacus.kv_write:kv_write", Tier.TUNED, supports=_floats_only)


@hookimpl
def merge_attention(device: DeviceInfo) -> Offer:
    return Offer("baige_abacus.merge_attention:merge_attention", Tier.TUNED, supports=_floats_only)


@hookimpl
def uva_sparse_gather(device: DeviceInfo) -> Offer:
    return Offer("baige_abacus.gather:uva_sparse_gather", Tier.TUNED, facts={"transport": "dma", "word_bytes": 4})
