"""What a swap-in hands to attention: rows, which of them are still in flight, and when they land."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.ops.hot_cache_resolve.contract import ResolvePlan

__all__ = ["SwapIn", "SwapStats", "Wave", "hot_rows_of"]


def hot_rows_of(first_rows: Tensor, slots: Tensor, hot_tokens: int) -> Tensor:
    """Rows of the hot pool int32 `[T, K]` for slots `[T, K]` of requests whose rows begin at int32 `[T]`; -1 stays."""
    if hot_tokens & (hot_tokens - 1) == 0:
        return slots | first_rows[:, None]  # one launch: slots are below the lowest bit of a first row
    return torch.where(slots < 0, -1, slots + first_rows[:, None])


@dataclass(frozen=True)
class Wave:
    """Rows of a swap-in that land together: those up to `stop`, from where the wave before ends."""

    stop: int
    event: Any


@dataclass(frozen=True)
class SwapIn:
    """One layer's rows for the queries of a step. Join it (`HotKVCache.join`) before the misses are read."""

    rows: Tensor
    """int32 `[T, K]`: row of the layer's hot pool for each wanted token, -1 for padding."""
    plan: ResolvePlan
    first_rows: Tensor
    """int32 `[T]`: first row of each request's hot buffer."""
    hot_tokens: int
    pool_rows: int
    """Rows of the layer's hot pool."""
    waves: tuple[Wave, ...]
    max_sms: int = 0
    """Bound of the cores of one wave's transfer; 0 left it to the backend."""

    def copying_sms(self, wave: int = 0) -> int:
        """Cores that transfers hold until `wave` has landed; 0 when unknown, or when none flies any more.

        The next wave's blocks may be placed, and wait, while the one before still runs.
        """
        return self.max_sms * min(2, len(self.waves) - wave)

    def landing(self) -> Tensor:
        """int32 `[T, K]`: rows of the hot pool that the transfer fills, compact, -1 behind the count."""
        return hot_rows_of(self.first_rows, self.plan.miss_slots, self.hot_tokens)

    def missed(self) -> Tensor:
        """bool `[T, K]`: which of `rows` are in flight until the transfer is joined."""
        mark = torch.zeros(self.pool_rows + 1, dtype=torch.bool, device=self.rows.device)
        # -1 marks the spare last entry, which stands for padding. (`mark[-1] = False` would copy from the host.)
        mark.index_fill_(0, self.landing().flatten().long(), True)
        mark[-1:].zero_()
        return mark.take(self.rows.long())

    def check_compact(self, missed: Tensor, width: int) -> None:
        """Stop the device when `landing()[:, :width]` is not all that the queries miss; without waiting for it."""
        counts = self.plan.miss_counts
        torch._assert_async(
            ((missed.sum(1) == counts) & (counts <= width)).all(),
            f"hisparse: expected at most {width} misses a query, and no two queries of one request",
        )


@dataclass(frozen=True)
class SwapStats:
    """Counts since construction; reading them synchronises."""

    wanted: int
    missed: int
    """Tokens, counted once for a group of layers."""
    swapped_rows: int
    """Rows that the layers fetched: every layer of a group fetches the group's misses."""
    swapped_bytes: int

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.missed / self.wanted if self.wanted else 1.0
