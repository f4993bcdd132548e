"""The frozen table of chosen ops: what the hot path calls. One attribute per op, no lookups, no hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from baige_device.errors import BackendError, OpUnsupported
from baige_device.ops import OP_NAMES, contract
from baige_device.registry.resolve import Candidate, Resolution

__all__ = ["OpTable"]

Checks = Literal["none", "shapes", "values"]


class _Counter:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class OpTable:
    """One callable per op, bound once at activation and never changed.

    `table.kv_write(...)` runs the contract's checks (see `Settings.checks`), counts the call and runs the chosen
    implementation. An op that the backend does not serve raises `OpUnsupported` with the reason kept from resolution;
    mounts ask `serves(op)` first when they can live without it.

    Raises:
        BackendError: a chosen implementation cannot be imported.
    """

    def __init__(self, backend: str, resolutions: Mapping[str, Resolution], checks: Checks = "shapes") -> None:
        bound: dict[str, Callable[..., Any]] = {}
        counters: dict[str, _Counter] = {}
        for op, resolution in resolutions.items():
            if resolution.chosen is not None:
                counters[op] = _Counter()
                bound[op] = _bind(op, _load(op, resolution.chosen), checks, counters[op])
        object.__setattr__(self, "_backend", backend)
        object.__setattr__(self, "_reasons", {op: resolution.reason for op, resolution in resolutions.items()})
        object.__setattr__(self, "_counters", counters)
        for op, function in bound.items():
            object.__setattr__(self, op, function)

    def serves(self, op: str) -> bool:
        """Whether the op is bound. Raises `KeyError` for a name that is no op."""
        if op not in OP_NAMES:
            raise KeyError(f"unknown op {op!r}; known: {', '.join(OP_NAMES)}")
        return op in self._counters

    def calls(self) -> dict[str, int]:
        """Python calls per bound op since activation. Replays of a captured graph make no Python call."""
        return {op: counter.calls for op, counter in self._counters.items()}

    def __getattr__(self, name: str) -> Any:
        if name in OP_NAMES:
            raise OpUnsupported(name, self._backend, self._reasons.get(name, "it was never resolved"))
        raise AttributeError(f"OpTable has no op {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"OpTable is frozen; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"OpTable is frozen; {name!r} cannot be deleted")


def _load(op: str, chosen: Candidate) -> Callable[..., Any]:
    try:
        return chosen.offer.load()
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"{op}: backend {chosen.backend!r} offers {chosen.offer.label}, which cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _bind(op: str, function: Callable[..., Any], checks: Checks, counter: _Counter) -> Callable[..., Any]:
    check = contract(op).check
    values = checks == "values"

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(values, *args, **kwargs)
        counter.calls += 1
        return function(*args, **kwargs)

    @functools.wraps(function)
    def unchecked(*args: Any, **kwargs: Any) -> Any:
        counter.calls += 1
        return function(*args, **kwargs)

    return unchecked if checks == "none" else checked
