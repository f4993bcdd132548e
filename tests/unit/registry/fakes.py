"""Backends made on the spot, given to discovery in place of entry points."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.manager import Source, sources
from baige_device.registry.offers import DeviceInfo, Need, Offer, Probe, Tier, Verdict

__all__ = ["backend", "offering", "source", "with_reference"]


def backend(
    *,
    present: bool = True,
    hardware: bool | None = None,
    probe_error: Exception | None = None,
    offers: dict[str, Offer | list[Offer]] | None = None,
) -> SimpleNamespace:
    """A plugin object; `hardware=None` leaves the hardware hook out."""

    @hookimpl
    def baige_probe() -> Probe:
        if probe_error is not None:
            raise probe_error
        return Probe(present, "fake chip found" if present else "no fake chip")

    plugin = SimpleNamespace(baige_probe=baige_probe)
    if hardware is not None:
        plugin.baige_hardware = hookimpl(lambda: Verdict.yes() if hardware else Verdict.no("no device node"))
    for op, offer in (offers or {}).items():
        setattr(plugin, op, hookimpl(_returning(offer)))
    return plugin


def _returning(offer: Any) -> Callable[[DeviceInfo], Any]:
    def hook(device: DeviceInfo) -> Any:
        return offer

    return hook


def offering(
    target: Callable[..., Any] | str, tier: Tier = Tier.TUNED, *, refuses: Callable[[Need], str] = lambda need: ""
) -> Offer:
    """An offer whose `supports` refuses with the text that `refuses` returns."""

    def supports(need: Need) -> Verdict:
        reason = refuses(need)
        return Verdict.no(reason) if reason else Verdict.yes()

    return Offer(target, tier, supports)


def source(name: str, plugin: object, origin: str = "fake-dist 1.0") -> Source:
    def load() -> object:
        if isinstance(plugin, Exception):
            raise plugin
        return plugin

    return Source(name, origin, load)


def with_reference(*fakes: Source) -> list[Source]:
    """The fakes beside the real reference backend."""
    return [item for item in sources(entry_points=()) if item.name == "reference"] + list(fakes)
