"""The errors that baige-device raises; messages name the op or setting, the argument, what was expected and got."""

from __future__ import annotations

__all__ = [
    "BaigeError",
    "ActivationError",
    "BackendError",
    "CapacityError",
    "ContractError",
    "HostMemoryError",
    "MountError",
    "OpUnsupported",
    "RankMismatch",
    "SettingsError",
]


class BaigeError(Exception):
    """Base class of every error raised by baige-device."""


class SettingsError(BaigeError):
    """A setting (environment, TOML file or engine option) is unknown or has a bad value."""


class BackendError(BaigeError):
    """A backend cannot be discovered, loaded, probed or chosen."""


class ActivationError(BaigeError):
    """Activation was asked for twice with different settings, or is missing where it is needed."""


class OpUnsupported(BaigeError):
    """No offer of the chosen backend serves an op as it is needed.

    Raised when ops are resolved, at activation, and never from the hot path. `asked` says who needs the op, and how.
    """

    def __init__(self, op: str, backend: str, reason: str, asked: str = "") -> None:
        by = f" [asked by {asked}]" if asked else ""
        super().__init__(f"{op}: backend {backend!r} cannot serve it: {reason}{by}")
        self.op = op
        self.backend = backend
        self.reason = reason
        self.asked = asked


class ContractError(BaigeError, ValueError):
    """An argument of an op breaks the op's contract."""

    def __init__(self, op: str, argument: str, expected: str, got: str) -> None:
        super().__init__(f"{op}: {argument}: expected {expected}, got {got}")
        self.op = op
        self.argument = argument
        self.expected = expected
        self.got = got


class CapacityError(ContractError):
    """More tokens than the agreed capacity; raised on every rank before any payload moves."""


class RankMismatch(BaigeError):
    """Two ranks of one process group differ in something that must be equal."""


class HostMemoryError(BaigeError):
    """Host memory of the size asked for cannot be had; the message carries the arithmetic and the remedy."""


class MountError(BaigeError):
    """A host engine is outside a mount's version window, or a symbol that a mount patches is missing."""
