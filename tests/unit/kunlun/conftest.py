"""The Kunlun tests run on the vendor's emulator; every test starts without cached vendor modules and answers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import kunlun_emulator  # noqa: E402 - needs the path

from baige_device.backends.kunlun import open_questions, vendor  # noqa: E402


def forget() -> None:
    """Drop what the backend has learnt about the vendor build."""
    vendor.forget()
    open_questions.forget()


@pytest.fixture(params=["torch2.9"])
def chip(request: pytest.FixtureRequest) -> Iterator[kunlun_emulator.STATE.__class__]:
    """The emulator with one vendor profile; parametrise indirectly for others."""
    with kunlun_emulator.installed(request.param) as state:
        forget()
        importlib.import_module("torch_xmlir")
        yield state
    forget()
