"""Environment of a process that finds the Kunlun emulator where the vendor's modules would be."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["SITE", "kunlun"]

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tests/kunlun_emulator/site"


def kunlun(*paths: str, backend: str = "kunlun") -> dict[str, str]:
    """`paths` go behind the emulator's, for distributions that a test made."""
    return {"BAIGE_BACKEND": backend, "PYTHONPATH": os.pathsep.join([str(SITE), *paths, str(ROOT)])}
