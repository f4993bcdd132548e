"""What HiSparse did since the start of this process, counted on the device and read only when somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COUNTS", "SwapCounts"]


class SwapCounts:
    """Hits, misses, and rows and bytes copied from host to device. Adding costs no synchronisation."""

    def __init__(self) -> None:
        self._totals: Tensor | None = None

    def add_lookups(self, hits: Tensor, misses: Tensor) -> None:
        """Distinct tokens of each request `[B]` that were in the hot buffer, and that were not."""
        self._on(hits)[:2] += torch.stack([hits.sum(), misses.sum()])

    def add_copies(self, rows: Tensor, row_bytes: int) -> None:
        """Rows of each request `[B]` that were copied."""
        copied = rows.sum()
        self._on(rows)[2:] += torch.stack([copied, copied * row_bytes])

    def totals(self) -> Tensor | None:
        """int64 `[4]` on the device: hits, misses, swapped rows, swapped bytes; None before the first."""
        return self._totals

    def read(self) -> dict[str, int]:
        """The totals; waits for the device."""
        totals = [0] * 4 if self._totals is None else self._totals.tolist()
        return dict(zip(("hits", "misses", "swapped_rows", "swapped_bytes"), totals, strict=True))

    def _on(self, like: Tensor) -> Tensor:
        if self._totals is None:
            self._totals = torch.zeros(4, dtype=torch.int64, device=like.device)
        return self._totals


COUNTS = SwapCounts()
"""The counts of this process."""
