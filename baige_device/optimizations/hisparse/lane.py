"""A lane of work beside the current stream: a stream of its own where the device has streams, inline elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["Lane"]

_Result = TypeVar("_Result")


class _Mark(NamedTuple):
    """A place in a lane, and whether it belongs to a graph capture."""

    event: Any
    captured: bool


class Lane:
    """Transfers that run beside compute. Events are opaque; None means that there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None], *keep: torch.Tensor, after: Any = None) -> Any:
        """Queue `work` behind the current stream and behind the event `after`; returns its event.

        `keep` are tensors that the caller may drop before the work has run.
        """
        if self._stream is None:
            work()
            return None
        self._begin()
        _wait(self._stream, after)
        with torch.cuda.stream(self._stream):
            work()
            for tensor in keep:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
            return _Mark(event, torch.cuda.is_current_stream_capturing())

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Queue `work` behind the current stream and return what it returns.

        Tensors made by it belong to the lane: give them to the lane's own work, or use them behind one of its events.
        """
        if self._stream is None:
            return work()
        self._begin()
        with torch.cuda.stream(self._stream):
            return work()

    def join(self, event: Any) -> None:
        """Make the current stream wait for an event of this lane."""
        if event is not None:
            _wait(torch.cuda.current_stream(self._stream.device), event)

    def synchronise(self) -> None:
        """Make the host wait for everything queued here."""
        if self._stream is not None:
            self._stream.synchronize()

    def _begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


def _wait(stream: Any, mark: _Mark | None) -> None:
    """Place a wait; a mark of a capture that is over, perhaps because it failed half way, means nothing any more."""
    if mark is None or (mark.captured and not torch.cuda.is_current_stream_capturing()):
        return
    stream.wait_event(mark.event)
