"""The activation record: what one process runs with, compared across ranks and shown to people."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from baige_device._version import __version__
from baige_device.errors import RankMismatch
from baige_device.registry.resolve import Resolution
from baige_device.settings import Settings

__all__ = ["ActivationRecord", "OpChoice", "compare_records", "installed_versions", "make_record"]


@dataclass(frozen=True)
class OpChoice:
    """How one op was resolved."""

    backend: str
    tier: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class ActivationRecord:
    """What must be equal on every rank of a process group (all fields), in plain values."""

    backend: str
    device: str
    reason: str
    engine: str
    ops: Mapping[str, OpChoice]
    absent: Mapping[str, str]
    """Ops that are not bound, with the reason."""
    optimizations: tuple[str, ...]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    settings_hash: str
    fallbacks: tuple[str, ...] = field(default=())

    def line(self) -> str:
        """One log line."""
        tiers: dict[str, int] = {}
        for choice in self.ops.values():
            tiers[choice.tier] = tiers.get(choice.tier, 0) + 1
        counts = ", ".join(f"{count} {tier}" for tier, count in sorted(tiers.items()))
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        optimizations = ", ".join(self.optimizations) or "none"
        return (
            f"baige-device active: backend {self.backend} on {self.device} ({self.reason}); ops: {counts}; "
            f"optimisations: {optimizations}; engine {self.engine or 'none'}; {versions}; settings {self.settings_hash}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, for JSON and for comparison."""
        return dataclasses.asdict(self)


def make_record(
    *,
    backend: str,
    device: str,
    reason: str,
    engine: str,
    resolutions: Mapping[str, Resolution],
    optimizations: tuple[str, ...],
    settings: Settings,
) -> ActivationRecord:
    """Collect the record of this process."""
    ops, absent = {}, {}
    for op, resolution in resolutions.items():
        if resolution.chosen is None:
            absent[op] = resolution.reason
        else:
            offer = resolution.chosen.offer
            ops[op] = OpChoice(resolution.chosen.backend, offer.tier.label, offer.label, resolution.reason)
    fallbacks = tuple(op for op, resolution in resolutions.items() if resolution.fell_back)
    return ActivationRecord(
        backend=backend,
        device=device,
        reason=reason,
        engine=engine,
        ops=ops,
        absent=absent,
        optimizations=optimizations,
        versions=installed_versions(),
        settings=settings.common(),
        settings_hash=settings.fingerprint(),
        fallbacks=fallbacks,
    )


def compare_records(records: list[Mapping[str, Any]]) -> None:
    """Compare the records of all ranks (as dictionaries, index = rank) with rank 0's.

    Raises:
        RankMismatch: naming the first field that differs, both ranks and both values.
    """
    for rank, record in enumerate(records[1:], start=1):
        difference = _first_difference(records[0], record, "")
        if difference is not None:
            path, first, other = difference
            raise RankMismatch(f"activation records differ at {path}: rank 0 has {first!r}, rank {rank} has {other!r}")


def _first_difference(first: Any, other: Any, path: str) -> tuple[str, Any, Any] | None:
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        for key in [*first, *(key for key in other if key not in first)]:
            found = _first_difference(first.get(key, "<missing>"), other.get(key, "<missing>"), f"{path}.{key}")
            if found is not None:
                return found
        return None
    return None if first == other else (path.lstrip("."), first, other)


def installed_versions(names: Sequence[str] = ("torch", "vllm", "sglang", "triton")) -> dict[str, str]:
    """Versions of baige-device, Python, and of those named that are installed."""
    found = {"baige-device": __version__, "python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
