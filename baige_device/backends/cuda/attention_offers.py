"""Tuned attention offers of the CUDA backend: kernels of other packages, used where they can be imported."""

from __future__ import annotations

import importlib.util
from typing import Any

from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict

__all__ = ["attend_paged", "index_topk", "sparse_attention"]


def attend_paged(device: DeviceInfo) -> list[Offer]:
    """No tuned dense kernel is wired; the portable one serves."""
    return []


def sparse_attention(device: DeviceInfo) -> list[Offer]:
    """FlashMLA, for 64 or 128 heads."""
    return [
        Offer(
            "baige_device.backends.cuda.flash_mla:sparse_attention",
            Tier.TUNED,
            supports=_flash_mla_supports,
            available=_flash_mla_available(),
            facts={"library": "flash_mla", "kv_formats": ("plain", "fp8_ds_mla"), "graph_capturable": True},
        )
    ]


def index_topk(device: DeviceInfo) -> list[Offer]:
    """No tuned indexer is wired; the portable one serves."""
    return []


def _flash_mla_available() -> Verdict:
    """Whether its kernels are there and the device is of the generation that they are built for."""
    if importlib.util.find_spec("torch") is None:
        return Verdict.no("torch is not installed")
    from baige_device.backends.cuda.flash_mla_library import find_flash_mla

    if find_flash_mla() is None:
        return Verdict.no(
            "FlashMLA is not there: the package flash_mla is not installed (pip install sgl-flash-mla), and no engine "
            "has loaded its own build"
        )
    import torch

    if not torch.cuda.is_available():
        return Verdict.no("no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return Verdict.no(
            f"compute capability {capability[0]}.{capability[1]}; its kernels with 656-byte rows need 9.0"
        )
    return Verdict.yes()


def _flash_mla_supports(need: Need) -> Verdict:
    """Judge by the keys that decide the kernel; see `baige_device/testing/needs.py`."""
    wanted: dict[str, tuple[Any, ...]] = {
        "dtype": ("bfloat16",),
        "head_size": (576,),
        "v_head_size": (512,),
        "num_q_heads": (64, 128),
        "num_kv_heads": (1,),
        "mla": (True,),
    }
    for key, values in wanted.items():
        if key in need.params and need.params[key] not in values:
            return Verdict.no(f"FlashMLA needs {key} in {values}, not {need.params[key]}")
    return Verdict.yes()
