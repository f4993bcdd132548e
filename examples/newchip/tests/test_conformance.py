"""The shipped conformance suite on the abacus chip."""

from baige_device.testing import BackendConformance


class TestAbacus(BackendConformance):
    backend = "abacus"
