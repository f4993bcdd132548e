"""Tuned attention offers of the CUDA backend: kernels of other packages, used where they can be imported."""

from __future__ import annotations

import importlib.util
from typing import Any

from baige_device.backends.cuda.flash_attention_shapes import DTYPES, MLA_SIZES, head_sizes_fit
from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict

__all__ = ["attend_paged", "index_topk", "sparse_attention"]


def attend_paged(device: DeviceInfo) -> list[Offer]:
    """FlashAttention 3, for 16-bit types and the head sizes that it has kernels for."""
    return [
        Offer(
            "baige_device.backends.cuda.flash_attention:attend_paged",
            Tier.TUNED,
            supports=_flash_attention_supports,
            available=_flash_attention_available(device),
            facts={"library": "flash_attention_3", "graph_capturable": True},
        )
    ]


def sparse_attention(device: DeviceInfo) -> list[Offer]:
    """FlashMLA, for 64 or 128 heads."""
    return [
        Offer(
            "baige_device.backends.cuda.flash_mla:sparse_attention",
            Tier.TUNED,
            supports=_flash_mla_supports,
            available=_flash_mla_available(device),
            facts={"library": "flash_mla", "kv_formats": ("plain", "fp8_ds_mla"), "graph_capturable": True},
        )
    ]


def index_topk(device: DeviceInfo) -> list[Offer]:
    """No tuned indexer is wired; the portable one serves."""
    return []


def _flash_attention_available(device: DeviceInfo) -> Verdict:
    """Whether its op is there and the device is of the generation that it is built for."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return Verdict.no(f"{package} is not installed")
    from baige_device.backends.cuda.flash_attention_library import find_flash_attention

    found, reason = find_flash_attention()
    return _hopper(device) if found else Verdict.no(f"FlashAttention 3 is not there: {reason}")


def _flash_attention_supports(need: Need) -> Verdict:
    """Judge by the keys that decide the kernel; see `baige_device/testing/needs.py`."""
    dtype = need.params.get("dtype", DTYPES[0])
    if dtype not in DTYPES:
        return Verdict.no(f"FlashAttention needs dtype in {DTYPES}, not {dtype}")
    if "head_size" in need.params:
        size, mla = need.params["head_size"], need.params.get("mla", False)
        v_size = need.params.get("v_head_size", MLA_SIZES[1] if mla else size)
        if not head_sizes_fit(size, v_size, mla):
            return Verdict.no(
                "FlashAttention needs equal head sizes up to 256 in steps of 8, 192 with values of 128, or the "
                f"latent of {MLA_SIZES[0]} with values of {MLA_SIZES[1]}, not {size} with {v_size}"
            )
    return Verdict.yes()


def _flash_mla_available(device: DeviceInfo) -> Verdict:
    """Whether its kernels are there and the device is of the generation that they are built for."""
    if importlib.util.find_spec("torch") is None:
        return Verdict.no("torch is not installed")
    from baige_device.backends.cuda.flash_mla_library import find_flash_mla

    if find_flash_mla() is None:
        return Verdict.no(
            "FlashMLA is not there: the package flash_mla is not installed (pip install sgl-flash-mla), and no engine "
            "has loaded its own build"
        )
    return _hopper(device)


def _hopper(device: DeviceInfo) -> Verdict:
    """Both libraries' kernels are machine code of compute capability 9.0.

    The probe's fact is asked and not torch, which would initialise CUDA: after that the process may no longer fork.
    """
    capability = device.facts.get("compute_capability")
    if capability is None:
        return Verdict.no("no CUDA device")
    if tuple(capability) != (9, 0):
        return Verdict.no(f"compute capability {capability[0]}.{capability[1]}; its kernels need 9.0")
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
