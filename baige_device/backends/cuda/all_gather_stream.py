"""The handle of a gather whose work is on a side stream."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["InFlight"]


class InFlight:
    """Forks a side stream off the current one; `wait` joins it. Works the same eagerly and under graph capture."""

    def __init__(self, side: torch.cuda.Stream, image: Tensor, shard: Tensor) -> None:
        self._side = side
        self._image = image
        self._event = torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream(image.device))
        if not torch.cuda.is_current_stream_capturing():
            # A caller may drop the tensors before the side stream is done with them.
            image.record_stream(side)
            shard.record_stream(side)

    def done(self) -> None:
        """Mark the end of the work; called on the side stream."""
        self._event.record(self._side)

    def wait(self) -> Tensor:
        """See the contract."""
        self._event.wait(torch.cuda.current_stream(self._image.device))
        return self._image
