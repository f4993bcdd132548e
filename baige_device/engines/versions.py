"""Version windows of host engines: PEP 440, where development and local builds count as their base release."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from baige_device.errors import MountError

__all__ = ["HostWindow", "base_release"]

logger = logging.getLogger("baige_device")


def base_release(version: str) -> Version:
    """`0.33.0rc2.dev5` and `0.33.0+cu129` -> `0.33.0`.

    Raises:
        MountError: the text is no PEP 440 version.
    """
    try:
        return Version(Version(version).base_version)
    except InvalidVersion as error:
        raise MountError(f"host version: expected a PEP 440 version, got {version!r}") from error


@functools.lru_cache(maxsize=8)
def _warn_once(host: str, version: str, base: str) -> None:
    logger.warning("%s %s is a development or local build; it is treated as %s", host, version, base)


@dataclass(frozen=True)
class HostWindow:
    """The versions of a host engine that the mounts were checked on."""

    distribution: str
    accepted: str

    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def check(self, version: str | None = None) -> Version:
        """Return the host's base release.

        Raises:
            MountError: the host is not installed or outside the window; names found and accepted versions.
        """
        found = version or self.installed()
        if found is None:
            raise MountError(f"{self.distribution}: not installed; accepted versions: {self.accepted}")
        base = base_release(found)
        if str(base) != found:
            _warn_once(self.distribution, found, str(base))
        if base not in SpecifierSet(self.accepted):
            raise MountError(
                f"{self.distribution}: found version {found}, accepted {self.accepted}; install a version inside the "
                "window, or set BAIGE_BACKEND=off"
            )
        return base

    def row_applies(self, specifier: str) -> bool:
        """Whether a ledger row's window contains the installed version (False when the host is not installed)."""
        found = self.installed()
        return found is not None and base_release(found) in SpecifierSet(specifier)
