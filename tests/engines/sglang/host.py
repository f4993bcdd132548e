"""Makes this machine look like a host on which SGLang can be imported although no backend of ours prepares it."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

EARLY = Path(__file__).resolve().parents[3] / "baige_device/engines/sglang/early.py"


@functools.cache
def prepare() -> None:
    """What the .pth does, once, but from a module of another name, so that nothing of baige-device is imported."""
    spec = importlib.util.spec_from_file_location("_host_shims", EARLY)
    assert spec is not None
    assert spec.loader is not None
    shims = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shims)
    shims.install()
