"""How long the compute stream waits for transfers: device events around a sample of the waits, never a host wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["StallTimer"]


class StallTimer:
    """Times every `every`-th wait by events of the device; on devices without events it counts nothing.

    The default is prime, so that the sample wanders over a model's layers. A wait inside a graph capture is not timed:
    its events would belong to the graph. Cost of a wait that is not sampled: one addition.
    """

    def __init__(self, device: torch.device, every: int = 97) -> None:
        self.count = 0
        """Waits that were timed."""
        self.total_us = 0.0
        """Microseconds of those."""
        self._device = device
        self._every = every if device.type == "cuda" else 0
        self._passed = 0
        self._pair: tuple[Any, Any] | None = None
        self._flying = False

    def begin(self) -> bool:
        """Call before the wait; when it returns True, call `end` behind the wait."""
        if not self._every:
            return False
        self._passed += 1
        if self._passed % self._every or torch.cuda.is_current_stream_capturing():
            return False
        if self._pair is None:
            self._pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if not self._harvest():
            return False
        self._pair[0].record(torch.cuda.current_stream(self._device))
        return True

    def end(self) -> None:
        """Close the pair that `begin` opened."""
        assert self._pair is not None
        self._pair[1].record(torch.cuda.current_stream(self._device))
        self._flying = True

    @contextmanager
    def timed(self) -> Iterator[None]:
        """`begin` and `end` around a block. What raises is not counted."""
        begun = self.begin()
        yield
        if begun:
            self.end()

    def _harvest(self) -> bool:
        """Take the time of the pair that was recorded last; False while the device has not come by."""
        if self._flying:
            assert self._pair is not None
            start, stop = self._pair
            if not stop.query():
                return False
            self.total_us += start.elapsed_time(stop) * 1e3
            self.count += 1
            self._flying = False
        return True
