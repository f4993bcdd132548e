"""What our attention backend does under HiSparse: where new rows go, which rows a prompt and a decode step attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baige_device.engines.sglang.hisparse_counts import COUNTS
from baige_device.engines.sglang.hisparse_swap import deferred_copies
from baige_device.metrics import add_source
from baige_device.optimizations.hisparse.lane import Lane
from baige_device.optimizations.hisparse.metrics import HiSparseMetrics
from baige_device.optimizations.hisparse.stall import StallTimer

__all__ = ["HiSparseRows", "make_rows"]

Attend = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows `[T, K]` -> (out `[T, H, Dv]`, lse `[T, H]`)."""


class HiSparseRows:
    """Slots of SGLang's scheduler are logical; the latent rows are where the coordinator says.

    Index keys stay on the device for every logical slot and need no translation.
    """

    def __init__(self, coordinator: Any, pool: Any, overlap: bool) -> None:
        self._coordinator = coordinator
        self._pool = pool
        self._lane = Lane(torch.device(coordinator.device)) if overlap else None
        self._stall = StallTimer(torch.device(coordinator.device))
        self._metrics = HiSparseMetrics(COUNTS.totals, self._stall)
        add_source(self._metrics)

    def observe(self) -> None:
        """Publish the counts and what is free; call it once a step."""
        coordinator = self._coordinator
        hot_rows = coordinator.token_to_kv_pool_allocator.hisparse_attn_allocator.available_size()
        self._metrics.observe(
            host_pages_free=coordinator.mem_pool_host.available_size() // coordinator.page_size,
            hot_rows_free=hot_rows // coordinator.padded_buffer_size,
        )

    def device_rows(self, slots: Tensor) -> Tensor:
        """Rows of the latent pool for logical slots, -1 for -1 (its last entry) and 0 for a token that left."""
        rows: Tensor = self._pool._translate_loc_to_hisparse_device(slots.long())
        return rows

    def attend(
        self,
        attend: Attend,
        merge: Callable[..., tuple[Tensor, Tensor]],
        topk: Tensor,
        layer_id: int,
        forward_batch: Any,
    ) -> Tensor:
        """Attention `[T, H, Dv]` of a decode step over the top-k tokens `[T, K]`, swapped in first.

        With overlap the rows that were there are attended while the others are on their way.
        """
        if self._lane is None:
            with self._stall.timed():
                rows = self._swap_in(topk, layer_id, forward_batch)
            return attend(rows)[0]
        with deferred_copies(self._lane) as copies:
            rows = self._swap_in(topk, layer_id, forward_batch)
        if copies.missed is None:  # a layer that shares the index of the one before: its rows are there
            return attend(rows)[0]
        missed = _padded(copies.missed, topk.shape[0], False)
        hits = attend(torch.where(missed, -1, rows))
        with self._stall.timed():
            copies.join()
        return merge(*hits, *attend(torch.where(missed, rows, -1)))[0]

    def _swap_in(self, topk: Tensor, layer_id: int, forward_batch: Any) -> Tensor:
        requests = forward_batch.req_pool_indices
        # The coordinator's tables hold the layers of this pipeline stage, the first one at 0.
        rows = self._coordinator.swap_in_selected_pages(
            requests, forward_batch.seq_lens, topk[: requests.shape[0]], layer_id - self._pool.start_layer
        )
        return _padded(rows, topk.shape[0], -1)


def make_rows(runner: Any, overlap: bool) -> HiSparseRows | None:
    """None without HiSparse. A coordinator of ours exists before SGLang makes the backend."""
    if runner.hisparse_coordinator is None:
        return None
    return HiSparseRows(runner.hisparse_coordinator, runner.token_to_kv_pool, overlap)


def _padded(rows: Tensor, tokens: int, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, tokens - rows.shape[0]), value=value)
