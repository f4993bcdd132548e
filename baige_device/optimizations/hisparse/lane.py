"""A lane of work beside the current stream: a stream of its own where the device has streams, inline elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Lane"]


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
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work()
            for tensor in keep:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def join(self, event: Any) -> None:
        """Make the current stream wait for an event of this lane."""
        if event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def synchronise(self) -> None:
        """Make the host wait for everything queued here."""
        if self._stream is not None:
            self._stream.synchronize()
