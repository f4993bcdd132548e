"""Which optimisations the settings switch on: the list that the activation record shows and that ranks compare."""

from __future__ import annotations

from baige_device.settings import Settings

__all__ = ["active_optimizations"]


def active_optimizations(settings: Settings) -> tuple[str, ...]:
    """Names for `activate(optimizations=...)`, in a fixed order. An engine's mount passes them where it mounts them."""
    switched = {"hisparse": settings.hisparse.enabled}
    return tuple(name for name, on in switched.items() if on)
