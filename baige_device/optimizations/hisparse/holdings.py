"""Who holds what: hot rows and host pages of each request, admission, growth, retraction and release."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from baige_device.errors import BaigeError
from baige_device.optimizations.hisparse.config import HiSparseConfig
from baige_device.optimizations.hisparse.pool import Pool

__all__ = ["Holding", "Holdings"]


@dataclass
class Holding:
    """What one request holds. `state_row` is None while the request is retracted."""

    state_row: int | None
    pages: list[int] = field(default_factory=list)


class Holdings:
    """Admission is the minimum over both pools; every change is all or nothing."""

    def __init__(self, config: HiSparseConfig) -> None:
        self._config = config
        self.rows = Pool("hisparse hot rows", config.max_requests)
        self.pages = Pool("hisparse host pages", config.host_pages)
        self._held: dict[Hashable, Holding] = {}

    def __contains__(self, request: Hashable) -> bool:
        return request in self._held

    def of(self, request: Hashable) -> Holding:
        """The holding of a request. Raises `BaigeError` when it holds nothing."""
        if request not in self._held:
            raise BaigeError(f"hisparse: request {request!r} was not admitted")
        return self._held[request]

    def admit(self, request: Hashable, tokens: int) -> Holding | None:
        """Reserve a hot row and host pages for `tokens`; None when there is no room now.

        Raises:
            BaigeError: the request is admitted already, or could never fit (with the numbers).
        """
        if request in self._held:
            raise BaigeError(f"hisparse: request {request!r} is admitted already")
        self._refuse_impossible(request, tokens)
        pages = self._page_count(tokens)
        if self.rows.free < 1 or self.pages.free < pages:
            return None
        holding = Holding(self.rows.take(1)[0], self.pages.take(pages))
        self._held[request] = holding
        return holding

    def grow(self, request: Hashable, tokens: int) -> list[int] | None:
        """Reserve pages up to `tokens` in all; the new pages, or None when there is no room now."""
        holding = self.of(request)
        self._refuse_impossible(request, tokens)
        missing = max(0, self._page_count(tokens) - len(holding.pages))
        if self.pages.free < missing:
            return None
        pages = self.pages.take(missing)
        holding.pages += pages
        return pages

    def retract(self, request: Hashable) -> int | None:
        """Give the hot row back and keep the pages; the row, or None when it was retracted already."""
        holding = self.of(request)
        row, holding.state_row = holding.state_row, None
        if row is not None:
            self.rows.give([row])
        return row

    def resume(self, request: Hashable) -> int | None:
        """Take a hot row again; None when there is none now."""
        holding = self.of(request)
        if holding.state_row is None and self.rows.free:
            holding.state_row = self.rows.take(1)[0]
        return holding.state_row

    def release(self, request: Hashable) -> Holding | None:
        """Give everything back; None when the request holds nothing (releasing twice is fine)."""
        holding = self._held.pop(request, None)
        if holding is not None:
            self.pages.give(holding.pages)
            if holding.state_row is not None:
                self.rows.give([holding.state_row])
        return holding

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self._config.page_tokens)

    def _refuse_impossible(self, request: Hashable, tokens: int) -> None:
        config = self._config
        if tokens > config.max_context_tokens or self._page_count(tokens) > config.host_pages:
            raise BaigeError(
                f"hisparse: request {request!r} of {tokens} tokens can never fit: a request may have "
                f"{config.max_context_tokens} tokens, and the host pool holds {config.host_pages * config.page_tokens}"
            )
