"""A random life of a `HotKVCache` beside a dictionary that holds every row, and the checks of each step."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from baige_device.optimizations.hisparse import HotKVCache, SwapIn

__all__ = ["Life"]

_KINDS = ("random", "duplicates", "first", "one", "none")
"""What a query wants: distinct tokens, some twice, the first ones (all scores equal), one, or nothing."""


class Life:
    """`act` does one random thing and checks what it can; `end` releases all and checks that nothing is lost."""

    def __init__(self, cache: HotKVCache, seed: int) -> None:
        self.cache = cache
        self.counts: dict[str, int] = {}
        """How often each action was done."""
        self._config = cache.config
        self._draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: dict[str, Tensor] = {}
        """What must be true: bytes `[layers, tokens, row_bytes]` of each request."""
        self._retracted: set[str] = set()
        self._serial = 0
        self._pages, self._requests = cache.free_host_pages, cache.free_requests

    def act(self) -> None:
        names = ("admit", "abort", "retract", "resume", "grow", "decode", "verify", "abort_in_flight")
        (action,) = self._draw.choices(names, weights=(18, 8, 10, 12, 15, 26, 7, 4))
        self.counts[action] = self.counts.get(action, 0) + 1
        if action == "decode":
            self._step(rows_each=1)
        elif action == "verify":
            self._step(rows_each=2)
        elif action == "abort_in_flight":
            self._step(rows_each=1, abort=True)
        else:
            getattr(self, f"_{action}")()

    def end(self) -> None:
        for name in list(self._rows):
            self._release(name)
        assert (self.cache.free_host_pages, self.cache.free_requests) == (self._pages, self._requests)

    def _admit(self) -> None:
        self._serial += 1
        name, tokens = f"r{self._serial}", self._draw.randint(1, 40)
        pages = -(-tokens // self._config.page_tokens)
        fits = self.cache.free_requests > 0 and self.cache.free_host_pages >= pages
        assert self.cache.admit(name, tokens) == fits
        if fits:
            self._rows[name] = self._random_rows(self._config.num_layers, tokens)
            states = self.cache.state_rows([name]).expand(tokens)
            for layer in range(self._config.num_layers):
                self.cache.store(layer, states, torch.arange(tokens), self._rows[name][layer])

    def _abort(self) -> None:
        if self._rows:
            self._release(self._draw.choice(list(self._rows)))

    def _retract(self) -> None:
        if self._live():
            name = self._draw.choice(self._live())
            self.cache.retract(name)
            self._retracted.add(name)

    def _resume(self) -> None:
        if self._retracted:
            name = self._draw.choice(sorted(self._retracted))
            room = self.cache.free_requests > 0
            assert self.cache.resume(name) == room
            if room:
                self._retracted.discard(name)

    def _grow(self) -> None:
        """Also of a retracted request, and to no more than it has."""
        if self._rows:
            name = self._draw.choice(list(self._rows))
            self.cache.grow(name, self._draw.randint(1, self._config.max_context_tokens))

    def _release(self, name: str) -> None:
        assert self.cache.release(name)
        assert not self.cache.release(name)
        del self._rows[name]
        self._retracted.discard(name)

    def _live(self) -> list[str]:
        return [name for name in self._rows if name not in self._retracted]

    def _length(self, name: str) -> int:
        return self._rows[name].shape[1]

    def _random_rows(self, *shape: int) -> Tensor:
        shape = (*shape, self._config.row_bytes)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self._generator)

    def _step(self, rows_each: int, abort: bool = False) -> None:
        """Append `rows_each` tokens to some requests, swap a top-k in for each, and check all rows in all layers.

        With `abort` one request is released while the last layer's rows are in flight, and nothing joins them.
        """
        batch = self._batch(rows_each)
        if not batch:
            return
        cache, layers = self.cache, self._config.num_layers
        names = [name for name in batch for _ in range(rows_each)]
        cache.begin_step()
        states = cache.state_rows([*names, None])
        positions = torch.tensor([self._length(name) + i % rows_each for i, name in enumerate(names)] + [0])
        new = self._random_rows(layers, len(names) + 1)
        for number, name in enumerate(batch):
            added = new[:, number * rows_each : (number + 1) * rows_each]
            self._rows[name] = torch.cat([self._rows[name], added], dim=1)
        topk = torch.tensor([*(self._wanted(name) for name in names), [-1] * self._config.topk], dtype=torch.int32)
        waves = self._waves(len(batch), rows_each)
        for layer in range(layers):
            cache.append(layer, states, positions, new[layer])
            swap = cache.swap_in(layer, states, topk, waves=waves)
            if abort and layer == layers - 1:
                self._release(self._draw.choice(batch))
                return
            cache.join(swap)
            self._check(layer, names, topk, swap)

    def _batch(self, rows_each: int) -> list[str]:
        most = self._config.max_context_tokens - rows_each
        fits = [name for name in self._live() if self._length(name) <= most]
        fits = self._draw.sample(fits, min(self._draw.choice((1, 1, 2, 3)), len(fits)))
        return [name for name in fits if self.cache.grow(name, self._length(name) + rows_each)]

    def _wanted(self, name: str) -> list[int]:
        topk, tokens = self._config.topk, range(self._length(name))
        kind = self._draw.choice(_KINDS)
        count = {"one": 1, "none": 0}.get(kind, min(topk, len(tokens)))
        pick = self._draw.choices(tokens, k=count) if kind == "duplicates" else self._draw.sample(tokens, count)
        pick = list(range(count)) if kind == "first" else pick
        return pick + [-1] * (topk - count)

    def _waves(self, requests: int, rows_each: int) -> tuple[int, ...]:
        """One transfer, or two whose border lies between two requests; the padded row is in the last."""
        first = self._draw.randint(0, requests) * rows_each
        return (first, requests * rows_each + 1 - first) if first else ()

    def _check(self, layer: int, names: list[str], topk: Tensor, swap: SwapIn) -> None:
        assert torch.equal(swap.rows < 0, topk < 0)
        hot = self.cache.hot[layer][swap.rows.clamp_min(0).long()]
        for name, wanted, got in zip(names, topk, hot, strict=False):
            real = wanted >= 0
            assert torch.equal(got[real], self._rows[name][layer][wanted[real].long()])
