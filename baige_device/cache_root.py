"""Where compiled kernels, the demo model and the environments of development are kept."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_root"]


def cache_root() -> Path:
    """`$BAIGE_CACHE`, else `~/.cache/baige-device`; it need not exist.

    Raises:
        RuntimeError: there is no home directory either (containers with an arbitrary user id).
    """
    return Path(os.environ.get("BAIGE_CACHE") or Path.home() / ".cache" / "baige-device")
