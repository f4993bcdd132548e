"""What HiSparse did since the start of this process, counted on the device and read only when somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COUNTS", "SwapCounts"]


class SwapCounts:
    """Hits, misses, and rows and bytes copied from host to device. Adding costs no synchronisation.

    Replayed copies run on a stream of their own and add to a row of their own: two streams would lose counts in one.
    """

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def add_lookups(self, hits: Tensor, misses: Tensor) -> None:
        """Distinct tokens of each request `[B]` that were in the hot buffer, and that were not."""
        self._on(hits)[0, :2] += torch.stack([hits.sum(), misses.sum()])

    def add_copies(self, rows: Tensor, row_bytes: int, *, replayed: bool = False) -> None:
        """Rows of each request `[B]` that were copied, or copied again for a layer that shares the index."""
        copied = rows.sum()
        self._on(rows)[int(replayed), 2:] += torch.stack([copied, copied * row_bytes])

    def totals(self) -> Tensor | None:
        """int64 `[4]` on the device: hits, misses, swapped rows, swapped bytes; None before the first."""
        return None if self._rows is None else self._rows.sum(0)

    def read(self) -> dict[str, int]:
        """The totals; waits for the device."""
        totals = self.totals()
        counts = [0] * 4 if totals is None else totals.tolist()
        return dict(zip(("hits", "misses", "swapped_rows", "swapped_bytes"), counts, strict=True))

    def _on(self, like: Tensor) -> Tensor:
        if self._rows is None:
            self._rows = torch.zeros(2, 4, dtype=torch.int64, device=like.device)
        return self._rows


COUNTS = SwapCounts()
"""The counts of this process."""
