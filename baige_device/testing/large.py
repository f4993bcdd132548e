"""Cases beyond 2^31 bytes or elements, where 32-bit offsets wrap; they run when asked for and when memory allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from baige_device.testing.cases import Case
from baige_device.testing.lab import Lab

__all__ = ["LARGE_BYTES", "large_case", "memory_refusal"]

LARGE_BYTES = 6 * 2**30
"""Address space that any one large case stays below; on a CPU device its untouched pages cost no memory."""


def large_case(op: str, id: str, run: Callable[[Lab], float], params: Mapping[str, Any]) -> Case:
    """A case of the `large` tag."""
    return Case(op, id, run, params, tags=frozenset({"large"}))


def memory_refusal(device: torch.device) -> str:
    """Why the large cases cannot run here, or the empty string."""
    host_free = psutil.virtual_memory().available
    if host_free < LARGE_BYTES:
        return f"large: needs {LARGE_BYTES} bytes of free host memory, {host_free} are free"
    if device.type == "cuda":
        device_free = torch.cuda.mem_get_info(device)[0]
        if device_free < LARGE_BYTES:
            return f"large: needs {LARGE_BYTES} bytes of free device memory, {device_free} are free"
    return ""
