"""An emulator of the Kunlun vendor's Python modules on CPU torch. It is no hardware and says so.

`site/` holds `torch_xmlir`, `kunlun_ops` and `xspeedgate_ops`, and `deep_ep_site/` `deep_ep`, with the vendor's names
and signatures, as far as public code shows them. They raise on every documented precondition, corrupt results silently
where the chip does, and leave unwritten what the chip leaves unwritten. Nothing of it ran on an XPU: it proves that an
adapter keeps the documented rules, not that the rules are right.

    with kunlun_emulator.installed("torch2.9"):      # in one process
        ...
    PYTHONPATH=tests/kunlun_emulator/site KUNLUN_EMULATOR_PROFILE=torch2.5 python ...   # in a process of its own
"""

from __future__ import annotations

from kunlun_emulator.install import installed
from kunlun_emulator.profiles import PROFILES, Profile
from kunlun_emulator.rules import chip_rules
from kunlun_emulator.state import STATE, CaptureViolation, ChipError

__all__ = ["PROFILES", "STATE", "CaptureViolation", "ChipError", "Profile", "chip_rules", "installed"]
