"""The CUDA backend's tuned offer for the experts' exchange: DeepEP, where it can be imported."""

from __future__ import annotations

import importlib.util

from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict

__all__ = ["moe_dispatch"]


def moe_dispatch(device: DeviceInfo) -> list[Offer]:
    """DeepEP 1.x, between 2, 4 or 8 GPUs of one host. Its results go back through the portable `moe_combine`."""
    facts = {"library": "deep_ep", "layouts": ("flat", "expert_major", "masked"), "graph_capturable": True}
    return [
        Offer(
            "baige_device.backends.cuda.moe_deep_ep:moe_dispatch",
            Tier.TUNED,
            supports=_supports,
            available=_available(),
            facts=facts,
        )
    ]


def _available() -> Verdict:
    if importlib.util.find_spec("deep_ep") is None:
        return Verdict.no("the package deep_ep is not installed")
    if importlib.util.find_spec("deep_ep_cpp") is None:
        return Verdict.no(
            "deep_ep is not of version 1 (no deep_ep_cpp); version 2 needs NCCL 2.30.4 and was not tested"
        )
    return Verdict.yes()


def _supports(need: Need) -> Verdict:
    """Judge by the keys that decide the transport; see `baige_device/testing/needs.py`."""
    params = need.params
    if params.get("ranks", 1) not in (2, 4, 8):
        return Verdict.no(f"DeepEP serves 2, 4 or 8 ranks of one host, not {params.get('ranks', 1)}")
    dtype, hidden = params.get("dtype", "bfloat16"), params.get("hidden_size", 7168)
    if dtype not in ("bfloat16", "float8_e4m3fn"):
        return Verdict.no(f"DeepEP moves bfloat16 and float8_e4m3fn, not {dtype}")
    if dtype == "float8_e4m3fn" and 128 * params.get("scale_blocks", 0) != hidden:
        return Verdict.no("DeepEP moves float8_e4m3fn with one scale for 128 columns")
    if hidden * (2 if dtype == "bfloat16" else 1) % 32 or 2 * hidden > 16352:
        return Verdict.no(f"DeepEP's rows have a multiple of 32 bytes and at most 8176 columns, not {hidden}")
    return Verdict.yes()
