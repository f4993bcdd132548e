"""Is a Kunlun chip here? Device nodes for the hardware, `torch_xmlir` for the software; never a name or a capability.

torch_xmlir makes the chip look like CUDA and several plugins overwrite the reported name and capability, so neither
identifies anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from baige_device.registry.offers import Probe, Verdict

__all__ = ["EMULATED_NAME", "device_nodes", "hardware", "probe"]

EMULATED_NAME = "Kunlun emulator"
_NEEDED = {
    "torch_xmlir": "torch_xmlir is not installed; it comes with the vendor's xpytorch installer for this Python and "
    "torch, not from a package index",
    "torch": "torch is not installed; the vendor's installer brings a matching one",
}
_FACTS = {
    "wire_formats": ("int8_absmax",),
    "fp8": False,
    "triton": False,  # and no JIT of another kind: what an engine would compile needs another way
    "page_tokens": 64,  # the indexer kernels take no other, and the dense kernels read it in place
}
_VENDOR_WHEELS = ("torch_xmlir", "kunlun_ops", "xspeedgate_ops", "deep_ep")


def device_nodes(dev: Path = Path("/dev")) -> list[str]:
    """The mapped chips, `xpu0` to `xpuN` in any subset. `xpuctrl` alone is no chip."""
    found = [path.name for path in dev.glob("xpu*") if re.fullmatch(r"xpu\d+", path.name)]
    return sorted(found, key=lambda name: int(name[3:]))


def hardware(dev: Path = Path("/dev")) -> Verdict:
    """Judge by device nodes; loads nothing."""
    nodes = device_nodes(dev)
    if not nodes:
        return Verdict.no(f"no Kunlun device node {dev}/xpu<N>")
    if not (dev / "xpuctrl").exists():
        return Verdict.no(f"{', '.join(nodes)} without {dev}/xpuctrl, which the runtime opens first; map it as well")
    return Verdict.yes(f"device nodes {', '.join(nodes)}")


def probe(dev: Path = Path("/dev")) -> Probe:
    """Load torch_xmlir and collect facts. An emulator says so itself and is never taken for hardware.

    Raises:
        VendorLibraryError: torch_xmlir is installed and does not load.
    """
    for name, reason in _NEEDED.items():
        if importlib.util.find_spec(name) is None:
            return Probe(False, reason)
    from baige_device.backends.kunlun import vendor

    runtime = vendor.load_torch_xmlir()
    emulated = bool(getattr(runtime, "__emulator__", False))
    facts = {**_software(), **_FACTS, "emulated": emulated, "distributed_backend": "gloo" if emulated else "nccl"}
    if emulated:
        return Probe(True, "torch_xmlir is the test emulator, no hardware", "cpu", EMULATED_NAME, facts)
    seen = hardware(dev)
    if not seen:
        return Probe(False, f"torch_xmlir is installed, and {seen.reason}")
    facts["device_nodes"] = tuple(device_nodes(dev))
    # The nodes are no part of the reason: ranks compare it, and a container may map other chips than its peers.
    return Probe(True, "torch_xmlir and device nodes are here", "cuda", "Kunlun XPU", facts)


def _software() -> dict[str, Any]:
    """Which vendor modules are there, by import name. Their versions are shown and never decide anything."""
    found: dict[str, Any] = {}
    for name in _VENDOR_WHEELS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "present, without metadata" if importlib.util.find_spec(name) else "absent"
    return found
