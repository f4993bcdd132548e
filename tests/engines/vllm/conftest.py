"""What the tests inside this process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baige_device.activation import activate, deactivate
from baige_device.settings import Settings


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference ops, active for one test."""
    monkeypatch.setenv("BAIGE_BACKEND", "reference")  # vLLM resolves its platform at the first import
    activate(Settings(backend="reference"))
    yield
    deactivate()
