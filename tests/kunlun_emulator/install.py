"""Putting the emulator into a process and taking it out again, without a trace."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from kunlun_emulator.profiles import PROFILES, Profile
from kunlun_emulator.state import STATE, State

__all__ = ["DEEP_EP_SITE", "SITE", "installed"]

SITE = Path(__file__).parent / "site"
DEEP_EP_SITE = Path(__file__).parent / "deep_ep_site"
"""`deep_ep` is apart, because engines look whether it can be found and then expect the upstream library."""
_MODULES = ("torch_xmlir", "kunlun_ops", "xtorch_ops", "xspeedgate_ops", "deep_ep", "deep_ep.buffer_v2")


@contextlib.contextmanager
def installed(profile: str | Profile = "torch2.9") -> Iterator[State]:
    """Within the block `import torch_xmlir` finds the emulator, and so do the vendor's op modules of the profile."""
    before = STATE.profile
    STATE.profile = PROFILES[profile] if isinstance(profile, str) else profile
    STATE.reset()
    _unload()
    sites = [str(SITE), *([str(DEEP_EP_SITE)] if "deep_ep" in STATE.profile.modules else [])]
    sys.path[:0] = sites
    importlib.invalidate_caches()
    try:
        yield STATE
    finally:
        for site in sites:
            sys.path.remove(site)
        _unload()
        STATE.profile = before
        STATE.registered.clear()


def _unload() -> None:
    from kunlun_emulator import patches, speed

    for name in _MODULES:
        sys.modules.pop(name, None)
    speed.unregister()
    patches.undo()
