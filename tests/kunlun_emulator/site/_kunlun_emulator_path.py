"""Makes the emulator's own package importable, and refuses modules that the chosen profile does not have."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

from kunlun_emulator.state import STATE  # noqa: E402 - needs the path


def admit(name: str) -> None:
    for module, message in STATE.profile.broken:
        if module == name:
            raise ImportError(message, name=name)
    if name not in STATE.profile.modules:
        raise ModuleNotFoundError(f"No module named {name!r} (Kunlun emulator, {STATE.profile.name})", name=name)
