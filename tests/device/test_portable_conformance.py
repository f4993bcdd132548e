"""The conformance kit against the portable tier of the CUDA backend, compiled."""

from __future__ import annotations

from baige_device.testing import BackendConformance
from tests.device.gpu import needs_gpu


@needs_gpu
class TestPortable(BackendConformance):
    backend = "cuda"
    tier = "portable"
    large = True
