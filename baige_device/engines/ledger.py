"""The ledger of everything a mount changes or registers in a host engine.

Each row states the target, why, the window of host versions it was checked on, and when it can go. Nothing is patched
without a row; a missing target is a `MountError` that names target, row and window, never a skipped patch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baige_device.engines.versions import HostWindow
from baige_device.errors import MountError

__all__ = ["Ledger", "Row", "TargetState"]

Kind = Literal["seam", "patch"]


@dataclass(frozen=True)
class Row:
    """One mount point.

    `seam` is a registration through the host's own extension API; `patch` replaces an attribute of the host.
    `target` is `package.module:Attribute.path`.
    """

    target: str
    kind: Kind
    why: str
    window: str
    """PEP 440 specifier of host versions on which the target exists, e.g. `>=0.30,<0.34`."""
    remove_when: str = ""
    """For patches: the upstream change that makes the row superfluous."""
    feature: str = "core"
    """What is lost without it: `core`, `dsa`, `moe`, `hisparse`, ..."""


@dataclass(frozen=True)
class TargetState:
    """A row as `doctor` shows it on the installed host."""

    row: Row
    applies: bool
    exists: bool
    applied: bool
    error: str = ""


@dataclass
class Ledger:
    """The rows of one host, and what was applied in this process."""

    host: str
    window: HostWindow
    rows: tuple[Row, ...]
    applied: dict[str, object] = field(default_factory=dict)
    """target -> the original attribute (None for seams)."""

    def row(self, target: str) -> Row:
        """The row of a target.

        Raises:
            MountError: the target has no row.
        """
        for row in self.rows:
            if row.target == target:
                return row
        raise MountError(f"{self.host}: {target} has no ledger row; every patch needs one")

    def resolve(self, target: str) -> tuple[Any, str, Any]:
        """Import a target: (owner, attribute name, current value).

        Raises:
            MountError: the target is missing in the installed host.
        """
        row = self.row(target)
        module, _, path = target.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            return owner, name, getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise MountError(
                f"{self.host} {self.window.installed() or '(absent)'}: patch target {target} is missing ({error}); "
                f"needed for {row.feature}: {row.why}; row window {row.window}"
            ) from error

    def patch(self, target: str, make: Callable[[Any], Any]) -> None:
        """Replace the target by `make(original)`, once per process.

        Raises:
            MountError: no row, wrong kind, or the target is missing.
        """
        row = self.row(target)
        if row.kind != "patch":
            raise MountError(f"{self.host}: {target} is a {row.kind} row and must not be patched")
        if target in self.applied:
            return
        owner, name, original = self.resolve(target)
        setattr(owner, name, make(original))
        self.applied[target] = original

    def note_seam(self, target: str) -> None:
        """Record that a seam was used, after checking that it exists.

        Raises:
            MountError: no row, or the target is missing.
        """
        if target not in self.applied:
            self.resolve(target)
            self.applied[target] = None

    def states(self, features: Iterable[str] | None = None) -> list[TargetState]:
        """Every row against the installed host; imports the host's modules."""
        wanted = None if features is None else set(features)
        return [self._state(row) for row in self.rows if wanted is None or row.feature in wanted]

    def verify_applied(self, features: Sequence[str]) -> None:
        """Check that every row of these features that applies to the installed host was applied.

        Hosts swallow plugin errors, so workers call this at initialisation.

        Raises:
            MountError: listing all rows that are missing.
        """
        missing = [
            row.target
            for row in self.rows
            if row.feature in features and self.window.row_applies(row.window) and row.target not in self.applied
        ]
        if missing:
            raise MountError(f"{self.host}: not mounted: {', '.join(missing)}; see the plugin errors logged above")

    def _state(self, row: Row) -> TargetState:
        applies = self.window.row_applies(row.window)
        try:
            self.resolve(row.target)
        except MountError as error:
            return TargetState(row, applies, False, False, str(error))
        return TargetState(row, applies, True, row.target in self.applied)
