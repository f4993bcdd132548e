"""Is an NVIDIA GPU here, and which? Device nodes first, then torch and NVML; no CUDA context is created."""

from __future__ import annotations

import importlib.util
import os

from baige_device.backends.cuda.nvml import first_gpu
from baige_device.registry.offers import Probe, Verdict

__all__ = ["hardware", "probe"]

_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""The driver's device nodes; `/dev/dxg` is the GPU under WSL."""


def hardware() -> Verdict:
    """Whether a device node of the NVIDIA driver exists."""
    for node in _NODES:
        if os.path.exists(node):
            return Verdict.yes(f"{node} exists")
    return Verdict.no(f"none of {', '.join(_NODES)} exists")


def probe() -> Probe:
    """Whether torch can use a GPU here. `torch.cuda.is_available()` alone says too much: other chips answer to it."""
    nodes = hardware()
    if not nodes:
        return Probe(False, nodes.reason)
    if importlib.util.find_spec("torch") is None:
        return Probe(False, "torch is not installed")
    import torch

    if torch.version.cuda is None:
        return Probe(False, f"torch {torch.__version__} is built without CUDA")
    count = torch.cuda.device_count()
    if count == 0:
        return Probe(False, "torch sees no GPU (is CUDA_VISIBLE_DEVICES empty, or the driver too old?)")
    found = first_gpu()
    if found is None:
        found = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    name, capability = found
    facts = {
        "compute_capability": capability,
        "devices": count,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
    }
    return Probe(True, f"{name}, compute capability {capability[0]}.{capability[1]}", "cuda", name, facts)
