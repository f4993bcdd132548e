"""An op table whose every call runs under the emulated chip's rules, and a context that makes the kit use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import kunlun_emulator
import pytest

from baige_device.registry.table import OpTable
from baige_device.testing import runner

__all__ = ["StrictTable", "strict_kit"]


class StrictTable:
    """Like `OpTable`; fresh memory is poison, float8 raises, host reads count (or raise with `capture`)."""

    capture = False

    def __init__(self, *args: Any) -> None:
        self._table = OpTable(*args)

    def serves(self, op: str) -> bool:
        return self._table.serves(op)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._table, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with kunlun_emulator.chip_rules(capture=self.capture and name != "host_alloc"):
                return function(*args, **kwargs)

        return call


class _Capturing(StrictTable):
    capture = True


@contextlib.contextmanager
def strict_kit(*, capture: bool = False) -> Iterator[None]:
    """Within the block the conformance kit calls ops under the chip's rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "OpTable", _Capturing if capture else StrictTable)
        yield
