"""The op tests call the reference through a real op table that checks shapes and values."""

from __future__ import annotations

import pytest
import torch

import baige_device
from baige_device.registry.table import OpTable
from baige_device.settings import Settings


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops() -> OpTable:
    return baige_device.activate(Settings(backend="reference", checks="values")).ops
