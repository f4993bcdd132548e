"""The reference backend conforms to every contract; the same class is what a vendor subclasses."""

from __future__ import annotations

from baige_device.testing import BackendConformance


class TestReference(BackendConformance):
    backend = "reference"
    seed = 20261129  # CI must say the same twice; `baige-device conformance` draws a fresh one
    ranks = (2, 3)
