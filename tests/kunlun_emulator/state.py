"""What the emulated chip knows: its profile, registered host memory, and counters for tests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kunlun_emulator.profiles import PROFILES, Profile

__all__ = ["STATE", "CaptureViolation", "ChipError", "State"]


class ChipError(RuntimeError):
    """What the vendor's kernels raise, at best, for a wrong argument."""


class CaptureViolation(ChipError):
    """Inside a graph capture the chip would produce garbage sizes here, without an error."""


@dataclass
class State:
    """State of the one emulated chip of this process."""

    profile: Profile = field(default_factory=lambda: PROFILES[os.environ.get("KUNLUN_EMULATOR_PROFILE", "torch2.9")])
    registered: dict[int, int] = field(default_factory=dict)
    """Registered host memory: address -> bytes."""
    syncs: int = 0
    """Reads of device values by the host since the last reset, under `chip_rules`."""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls of each vendor op."""
    capturing: bool = False
    tracking: bool = False
    """Whether host and device tensors are told apart (under `chip_rules`)."""

    def reset(self) -> None:
        self.syncs = 0
        self.calls.clear()

    def is_registered(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items())


STATE = State()
