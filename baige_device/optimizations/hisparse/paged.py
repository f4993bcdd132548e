"""A hot cache over host pages that an engine's own block manager hands out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from baige_device.errors import BaigeError
from baige_device.optimizations.hisparse.cache import HotKVCache

__all__ = ["PagedHotCache"]


class PagedHotCache(HotKVCache):
    """Requests own hot rows only; which host page holds which tokens is the engine's block table, given every step.

    `HiSparseConfig.host_tokens` is the engine's number of blocks times its block size, and `host[layer]` row
    `block * page_tokens + offset` is where the engine's slot mapping points. Two requests may name one page.
    """

    _newcomers = False

    def adopt(self, requests: Sequence[Hashable]) -> Tensor:
        """State rows int32 `[B]` of a step's requests; one that is new here gets a hot row, empty. None is padding.

        Raises:
            BaigeError: more requests at once than `max_requests`, or one that is retracted.
        """
        fresh = [request for request in requests if request is not None and request not in self._holdings]
        self._newcomers = bool(fresh)
        for request in fresh:
            if not self.admit(request, 0):
                raise BaigeError(
                    f"hisparse: request {request!r}: expected a free hot row, got none of {self.config.max_requests}"
                )
        return self.state_rows(list(requests))

    def set_pages(self, state_rows: Tensor, block_table: Tensor) -> None:
        """Take the engine's block table `[B, M]` for the states `[B]` (-1 is padding); columns behind a request's
        tokens are never read."""
        width = min(block_table.shape[1], self._pages.shape[1])
        self._pages[state_rows.long(), :width] = block_table[:, :width].long()

    def append(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """As the base class; a step that a request enters waits for the backups of others before it swaps in.

        An engine that caches prefixes may give a new request a page whose last row another one appends in this step.
        """
        hot_rows = super().append(layer, state_rows, positions, rows)
        if self._newcomers:
            self._stored_event = self._backup_event
        return hot_rows

    def host_rows(self, block_table: Tensor, tokens: int) -> Tensor:
        """int64 `[tokens]`: rows of `host[layer]` of a request's first tokens, by its block table `[M]`."""
        page_tokens = self.config.page_tokens
        positions = torch.arange(tokens, device=self.device)
        return block_table.long()[positions // page_tokens] * page_tokens + positions % page_tokens

    def wait_for_backup(self) -> None:
        """Make the current stream wait until every row stored or appended so far is in the host pool."""
        self._backup.join(self._backup_event)

    def host_view(self, layer: int, dtype: torch.dtype) -> Tensor:
        """A layer's host rows as the engine's `[blocks, page_tokens, columns]`."""
        rows: Tensor = self.host[layer].view(dtype)
        return rows.view(-1, self.config.page_tokens, rows.shape[1])
