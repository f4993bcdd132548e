"""The small value types that backends and mounts exchange with the registry. No torch is imported here."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DeviceInfo", "Finding", "Need", "Offer", "Probe", "Tier", "Verdict"]


class Tier(enum.IntEnum):
    """How good an implementation is for its chip; of the offers that serve all needs the highest tier is chosen."""

    REFERENCE = 0
    """Plain torch: the ground truth. In a hot path only when the user asks for it."""
    PORTABLE = 1
    """One source for many chips (Triton, vendor-neutral torch)."""
    TUNED = 2
    """The best kernel that exists for this chip."""

    @property
    def label(self) -> str:
        """The tier's name as users write it: `tuned`, `portable` or `reference`."""
        return self.name.lower()


@dataclass(frozen=True)
class Verdict:
    """Yes or no, and why. A refusal always carries its reason."""

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.ok and not self.reason:
            raise ValueError("Verdict: reason: expected a text with every refusal, got ''")

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def yes(cls, reason: str = "") -> Verdict:
        return cls(True, reason)

    @classmethod
    def no(cls, reason: str) -> Verdict:
        return cls(False, reason)


@dataclass(frozen=True)
class Need:
    """What one user of an op (an attention layer, an optimisation) will ask of it.

    `params` are plain values in the contract's own words: `dtype="bfloat16"`, `head_size=576`, `num_kv_heads=1`,
    `layout="masked"`, `graph=True`. A backend must answer for the keys that it knows and may ignore the others.
    """

    op: str
    who: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """`op(head_size=192, dtype=bfloat16) for WHO`, for messages."""
        inner = ", ".join(f"{key}={value}" for key, value in sorted(self.params.items()))
        return f"{self.op}({inner}) for {self.who}"


@dataclass(frozen=True)
class DeviceInfo:
    """The chip that a backend's probe found, as its op hooks see it."""

    backend: str
    torch_device: str
    """The torch device type of its tensors. Kunlun under torch_xmlir says `cuda`, so this is no identity."""
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One row that a backend adds to `doctor`: what was asked, what was found, what it decides."""

    name: str
    ok: bool
    detail: str
    decides: str = ""


@dataclass(frozen=True)
class Probe:
    """A backend's answer to 'is this chip here?'."""

    present: bool
    reason: str
    torch_device: str = "cpu"
    device_name: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def device(self, backend: str) -> DeviceInfo:
        return DeviceInfo(backend, self.torch_device, self.device_name or backend, self.facts)


def _always(need: Need) -> Verdict:
    return Verdict.yes()


@dataclass(frozen=True)
class Offer:
    """One implementation of one op by one backend.

    `target` is `"module:attribute"`, imported only when the offer is chosen, or the callable itself.
    `available` is decided when the offer is made (a vendor library lacks the symbol); `supports` judges one `Need`.
    `facts` are measured or documented properties by name: `graph_capturable`, `max_sms`, `wire_formats`, `layouts`,
    `link_bytes_per_s`; they are shown by `doctor` and read by the optimisations' cost models.
    """

    target: str | Callable[..., Any]
    tier: Tier
    supports: Callable[[Need], Verdict] = _always
    available: Verdict = field(default_factory=Verdict.yes)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The implementation's dotted name, for `doctor` and the activation record."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{getattr(self.target, '__qualname__', repr(self.target))}"

    def load(self) -> Callable[..., Any]:
        """Import the implementation. Errors of the import propagate."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return loaded
