"""From settings to the optimisations in the activation record."""

from __future__ import annotations

import baige_device
from baige_device.optimizations.active import active_optimizations
from baige_device.settings import Settings, load_settings


def test_none_by_default() -> None:
    assert active_optimizations(load_settings()) == ()


def test_what_is_switched_on_is_in_the_record() -> None:
    settings = Settings(backend="reference", hisparse={"host_gib_per_node": 1})  # type: ignore[arg-type]
    active = baige_device.activate(settings, optimizations=active_optimizations(settings))
    assert active.record.optimizations == ("hisparse",)
    assert "optimisations: hisparse;" in active.record.line()
    assert active.record.settings["hisparse"]["host_gib_per_node"] == 1
