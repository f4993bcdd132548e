"""Every unit test starts without an activation and without the user's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from baige_device.activation import deactivate

# Triton fixes how it runs a kernel when the kernel is defined: before any test module imports one.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("BAIGE_") and name != "BAIGE_CACHE":
            monkeypatch.delenv(name)
    deactivate()
    yield
    deactivate()
