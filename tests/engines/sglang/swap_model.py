"""A plain-Python model of SGLang's HiSparse kernels: dictionaries and lists, one request after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["World"]

_PAGE_TOKENS = 4


@dataclass
class World:
    """Tables and pools as SGLang's coordinator allocates them, and the model's own view of each request."""

    requests: int
    hot_tokens: int
    context: int
    row: tuple[int, ...] = (1, 5)
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        slots, rows = self.hot_tokens + _PAGE_TOKENS, self.requests * (self.hot_tokens + _PAGE_TOKENS)
        self.locs = self._shuffled(rows).view(self.requests, slots).int()
        self.tokens = torch.full((self.requests, slots), -1, dtype=torch.int32)
        self.tokens[:, : self.hot_tokens] = torch.arange(self.hot_tokens, dtype=torch.int32)
        self.lru = torch.arange(self.hot_tokens, dtype=torch.int16).repeat(self.requests, 1)
        self.host_locs = self._shuffled(self.requests * self.context).view(self.requests, self.context)
        self.host = torch.randn(self.requests * self.context, *self.row, generator=self.generator)
        self.device = torch.full((rows, *self.row), torch.nan)
        self.held = [{token: token for token in range(self.hot_tokens)} for _ in range(self.requests)]
        self.order = [list(range(self.hot_tokens)) for _ in range(self.requests)]
        for request in range(self.requests):
            for token, slot in self.held[request].items():
                self.device[self.locs[request, slot].long()] = self.host[self.host_locs[request, token]]

    def grow(self, request: int, seq_len: int) -> None:
        """The newest token of a request lands in its slot."""
        slot = min(seq_len - 1, self.hot_tokens)
        self.device[self.locs[request, slot].long()] = self.host[self.host_locs[request, seq_len - 1]]

    def expect(self, request: int, seq_len: int, wanted: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The device row of each wanted token and the (host row, device row) copies; updates the model's state."""
        held, order = self.held[request], self.order[request]
        if seq_len <= self.hot_tokens:
            return [self._loc(request, token) if 0 <= token < seq_len else -1 for token in wanted], []
        looked_up = [token for token in wanted if 0 <= token < seq_len - 1]
        hits = [slot for slot in order if any(held.get(token) == slot for token in looked_up)]
        untouched = [slot for slot in order if slot not in hits]
        missing = list(dict.fromkeys(token for token in looked_up if token not in held))
        victims, copies = untouched[: len(missing)], []
        for token, slot in zip(missing, victims, strict=True):
            for old in [key for key, value in held.items() if value == slot]:
                del held[old]
            held[token] = slot
            copies.append((int(self.host_locs[request, token]), self._loc(request, slot)))
        self.order[request] = untouched[len(missing) :] + victims + hits
        places = {**held, seq_len - 1: self.hot_tokens}
        return [self._loc(request, places[token]) if 0 <= token < seq_len else -1 for token in wanted], copies

    def check_state(self) -> None:
        """SGLang's tables say what the model says."""
        for request in range(self.requests):
            tokens = self.tokens[request, : self.hot_tokens].tolist()
            assert {token: slot for slot, token in enumerate(tokens)} == self.held[request]
            assert self.lru[request].tolist() == self.order[request]

    def check_rows(self, request: int, wanted: list[int], locs: list[int]) -> None:
        """The device rows hold the wanted tokens."""
        for token, loc in zip(wanted, locs, strict=True):
            if loc >= 0:
                assert torch.equal(self.device[loc], self.host[self.host_locs[request, token]]), (request, token)

    def tables(self) -> dict[str, Any]:
        """The arguments of all entry points that name the tables."""
        return {
            "device_buffer_tokens": self.tokens,
            "device_buffer_locs": self.locs,
            "host_cache_locs": self.host_locs,
            "lru_slots": self.lru,
        }

    def wanted(self, seq_len: int, count: int) -> list[int]:
        """Distinct tokens, -1 anywhere when there are too few; often the newest one."""
        choice = torch.randperm(seq_len, generator=self.generator)[:count].tolist()
        choice += [-1] * (count - len(choice))
        return [choice[i] for i in torch.randperm(count, generator=self.generator).tolist()]

    def _loc(self, request: int, slot: int) -> int:
        return int(self.locs[request, slot])

    def _shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)
