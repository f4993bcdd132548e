"""`HotKVCache`: the data plane of HiSparse over the op table. No engine, no chip."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baige_device.errors import BaigeError
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from baige_device.optimizations.hisparse.config import HiSparseConfig
from baige_device.optimizations.hisparse.holdings import Holdings
from baige_device.optimizations.hisparse.lane import Lane
from baige_device.optimizations.hisparse.stall import StallTimer
from baige_device.optimizations.hisparse.swap import SwapIn, SwapStats, Wave, hot_rows_of
from baige_device.registry.table import OpTable

__all__ = ["HotKVCache"]


class HotKVCache:
    """A hot buffer of `hot_tokens` rows per request and layer on the device, all rows in host memory.

    A step: `begin_step`, then per layer `append` (the new tokens), `swap_in` (the indexer's top-k), attention over
    `hot[layer]` at `SwapIn.rows` after `join`. Layers of one group must be called in the same order; the first one
    resolves for all. Prompts go to the host by `store`. Rows are bytes; views of other dtypes are the caller's.

    A step never waits for the host, so it can be captured in a CUDA graph where the ops can: call `end_step` before the
    capture begins and as its last call. Tensors of a step (`state_rows`, `positions`) are known by identity: pass the
    same objects to every layer, and what depends on them alone is computed once.

    Raises at construction:
        HostMemoryError: the host pool cannot be had. OpUnsupported: the backend lacks one of the gather ops.
    """

    def __init__(self, config: HiSparseConfig, ops: OpTable, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._ops = ops
        pool_rows = config.host_pages * config.page_tokens
        hot_rows = config.max_requests * config.hot_tokens
        self.hot = torch.zeros(config.num_layers, hot_rows, config.row_bytes, dtype=torch.uint8, device=device)
        slot_dtype = torch.int16 if config.hot_tokens <= 1 << 15 else torch.int32
        states = (len(set(config.groups)), config.max_requests + 1, config.hot_tokens)
        self._slot_keys = torch.full(states, -1, dtype=torch.int32, device=device)
        self._order = torch.arange(config.hot_tokens, dtype=slot_dtype, device=device)
        self._lru_slots = self._order.expand(states).contiguous()
        table = (config.max_requests + 1, config.pages_per_request)
        self._pages = torch.zeros(table, dtype=torch.int64, device=device)
        self._holdings = Holdings(config)
        self._backup, self._swap = Lane(device), Lane(device)
        self._backup_event: Any = None
        self._swap_event: Any = None
        self._stored_event: Any = None
        self._appended: dict[int, Tensor] = {}
        self._resolved: dict[tuple[int, int], _Resolved] = {}
        self._targets: dict[tuple[int, int], _Targets] = {}
        self._bases: dict[int, _Bases] = {}
        self._wanted = torch.zeros((), dtype=torch.int64, device=device)
        self._group_missed = torch.zeros(states[0], dtype=torch.int64, device=device)
        self._group_layers = torch.tensor(config.groups, device=device).bincount()
        self.stall = StallTimer(device)
        # Last, because nobody would unregister it if the device memory above cannot be had.
        self._buffer = ops.host_alloc(config.num_layers * pool_rows * config.row_bytes)
        self.host = self._buffer.tensor.view(config.num_layers, pool_rows, config.row_bytes)

    @property
    def free_requests(self) -> int:
        return self._holdings.rows.free

    @property
    def free_host_pages(self) -> int:
        return self._holdings.pages.free

    def admit(self, request: Hashable, tokens: int) -> bool:
        """Reserve a hot buffer and host pages for `tokens`; False when there is no room now (try after a release).

        Raises:
            BaigeError: admitted already, or it could never fit (with the numbers).
        """
        holding = self._holdings.admit(request, tokens)
        if holding is None:
            return False
        assert holding.state_row is not None
        self._start(holding.state_row, holding.pages)
        return True

    def grow(self, request: Hashable, tokens: int) -> bool:
        """Make sure that the request's host pages hold `tokens` in all; False when there is no room now."""
        before = len(self._holdings.of(request).pages)
        added = self._holdings.grow(request, tokens)
        if added is None:
            return False
        row = self._holdings.of(request).state_row
        if added and row is not None:
            self._pages[row, before : before + len(added)] = torch.tensor(added, device=self.device)
        return True

    def retract(self, request: Hashable) -> None:
        """Give the hot buffer up and keep the host rows; `resume` continues without loss."""
        self._settle()
        self._holdings.retract(request)

    def resume(self, request: Hashable) -> bool:
        """Take a hot buffer again, empty; False when there is none now."""
        if self._holdings.of(request).state_row is not None:
            return True
        row = self._holdings.resume(request)
        if row is None:
            return False
        self._start(row, self._holdings.of(request).pages)
        return True

    def release(self, request: Hashable) -> bool:
        """Free everything of a request after its transfers have landed; False when it holds nothing (twice is fine)."""
        if request not in self._holdings:
            return False
        self._settle()
        self._holdings.release(request)
        return True

    def state_rows(self, requests: list[Hashable]) -> Tensor:
        """int32 `[B]` for a step's batch; None stands for a padded row.

        Raises:
            BaigeError: a request that is not admitted, or is retracted.
        """
        rows = []
        for request in requests:
            row = -1 if request is None else self._holdings.of(request).state_row
            if row is None:
                raise BaigeError(f"hisparse: request {request!r} is retracted; resume it first")
            rows.append(row)
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def begin_step(self) -> None:
        """Forget the plans of the step before, after its transfers."""
        self.end_step()
        self._appended.clear()
        self._resolved.clear()
        self._targets.clear()
        self._bases.clear()

    def end_step(self) -> None:
        """Make the current stream wait for everything that the step has queued beside it."""
        self._backup.join(self._backup_event)
        self._swap.join(self._swap_event)
        self._backup_event = self._swap_event = self._stored_event = None

    def store(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Write prompt rows `[T, row_bytes]` to the host; the requests' hot buffers of this layer's group are emptied.

        `state_rows` `[T]` (-1 is padding) and `positions` `[T]` say whose and which tokens the rows are.
        """
        self._slot_keys[self.config.groups[layer], state_rows.long()] = -1  # -1 empties the spare last state
        self._mirror(layer, state_rows, positions, rows)
        self._stored_event = self._backup_event

    def append(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Put new tokens' rows `[T, row_bytes]` into the hot buffers and mirror them to the host.

        Returns:
            int32 `[T]`: their rows in `hot[layer]`, -1 for padding.
        """
        group = self.config.groups[layer]
        if group not in self._appended:
            keys = torch.where(state_rows < 0, -1, positions).int()[:, None]
            plan = self._ops.hot_cache_resolve(keys, state_rows, self._slot_keys[group], self._lru_slots[group])
            self._appended[group] = self._hot_rows(state_rows, plan.slots)[:, 0]
        hot_rows = self._appended[group]
        self._ops.kv_write(rows[:, None], self.hot[layer][:, None, None], hot_rows)
        self._mirror(layer, state_rows, positions, rows)
        return hot_rows

    def swap_in(
        self,
        layer: int,
        state_rows: Tensor,
        topk: Tensor,
        *,
        waves: Sequence[int] = (),
        part: int = 0,
        max_sms: int = 0,
    ) -> SwapIn:
        """Bring the wanted tokens `topk` `[T, K]` (positions, -1 padding) into the hot buffer; starts the transfer.

        Rows of one request (speculative verify) share the union of their tokens, which must fit `hot_tokens`.

        Args:
            waves: rows of each of several transfers, which land one after the other; their sum is T. Empty: one
                transfer. Rows of one request belong to one wave.
            part: which part of the step's batch this is, when the layers swap theirs in several calls, each as soon as
                its top-k is known. Rows of one request belong to one part.
            max_sms: as for `uva_sparse_gather`; attention that overlaps the transfer then leaves these cores to it.
        """
        key = (self.config.groups[layer], part)
        fresh = key not in self._resolved
        if fresh:
            self._resolved[key] = self._resolve(key[0], state_rows, topk)
        found = self._resolved[key]
        landed, stop = [], 0
        for count in waves or topk.shape[:1]:
            start, stop = stop, stop + count
            landed.append(Wave(stop, self._fetch(layer, found, slice(start, stop), max_sms)))
        if fresh:
            self._swap_event = self._swap.run(lambda: self._count(key[0], found.plan))
        return SwapIn(
            found.rows, found.plan, found.first_rows, self.config.hot_tokens, self.hot.shape[1], tuple(landed), max_sms
        )

    def join(self, swap: SwapIn, wave: int | None = None) -> None:
        """Make the current stream wait for one wave of the transfer, or for all of it."""
        timed = self.stall.begin()
        for landed in swap.waves if wave is None else swap.waves[wave : wave + 1]:
            self._swap.join(landed.event)
        if timed:
            self.stall.end()

    def stats(self) -> SwapStats:
        """Counts since construction; waits for the device."""
        hits, missed, rows, num_bytes = self.totals().tolist()
        return SwapStats(hits + missed, missed, rows, num_bytes)

    def totals(self) -> Tensor:
        """int64 `[4]` on the device: hits, misses, and rows and bytes swapped in by all layers, since construction."""
        missed, rows = self._group_missed.sum(), (self._group_missed * self._group_layers).sum()
        return torch.stack([self._wanted - missed, missed, rows, rows * self.config.row_bytes])

    def close(self) -> None:
        """Free the host pool. Nothing may be used afterwards."""
        self._settle()
        self.host = self.host.new_empty(0)
        self._buffer.close()

    def _start(self, row: int, pages: list[int]) -> None:
        self._slot_keys[:, row] = -1
        self._lru_slots[:, row] = self._order
        self._pages[row, : len(pages)] = torch.tensor(pages, dtype=torch.int64, device=self.device)

    def _settle(self) -> None:
        self._backup.synchronise()
        self._swap.synchronise()

    def _bases_of(self, state_rows: Tensor) -> _Bases:
        """Where the states' hot rows and block tables begin; the tensor is kept, so that its identity stays taken."""
        if id(state_rows) not in self._bases:
            first_rows = (state_rows * self.config.hot_tokens).int()
            tokens = self._pages.shape[1] * self.config.page_tokens
            self._bases[id(state_rows)] = _Bases(state_rows, first_rows, state_rows.long()[:, None] * tokens)
        return self._bases[id(state_rows)]

    def _mirror(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> None:
        key = (id(state_rows), id(positions))
        if key not in self._targets:
            host_rows = self._host_rows(self._bases_of(state_rows).tokens, positions[:, None])[:, 0]
            host_rows = torch.where(state_rows < 0, -1, host_rows)
            source = torch.arange(rows.shape[0], device=self.device)
            self._targets[key] = _Targets(positions, source, host_rows)
        _, source, host_rows = self._targets[key]

        def transfer() -> None:
            self._ops.uva_sparse_scatter(rows, self.host[layer], source, host_rows)

        self._backup_event = self._backup.run(transfer, rows, host_rows, source)

    def _resolve(self, group: int, state_rows: Tensor, topk: Tensor) -> _Resolved:
        plan = self._ops.hot_cache_resolve(topk, state_rows, self._slot_keys[group], self._lru_slots[group])
        rows, bases = self._hot_rows(state_rows, plan.slots), self._bases_of(state_rows)
        # On the lane: only the transfer needs them.
        host_rows = self._swap.call(lambda: self._host_rows(bases.tokens, plan.miss_keys))
        return _Resolved(plan, rows, bases.first_rows, host_rows)

    def _fetch(self, layer: int, found: _Resolved, part: slice, max_sms: int) -> Any:
        """Start the transfer of some rows' misses; returns its event.

        Rows appended in this step need no waiting for: the hot buffer has what this step wants of them.
        """
        plan = found.plan

        def transfer() -> None:
            self._ops.uva_sparse_gather(
                self.host[layer], self.hot[layer], found.host_rows[part], plan.miss_slots[part], plan.miss_counts[part],
                dst_offsets=found.first_rows[part], max_sms=max_sms,
            )  # fmt: skip

        self._swap_event = self._swap.run(transfer, after=self._stored_event)
        return self._swap_event

    def _count(self, group: int, plan: ResolvePlan) -> None:
        self._wanted += (plan.slots >= 0).sum()
        self._group_missed[group].add_(plan.miss_counts.sum())

    def _hot_rows(self, state_rows: Tensor, slots: Tensor) -> Tensor:
        return hot_rows_of(self._bases_of(state_rows).first_rows, slots, self.config.hot_tokens)

    def _host_rows(self, bases: Tensor, positions: Tensor) -> Tensor:
        """int64 host rows of positions; what comes out for -1 is some row or other.

        `bases` `[T, 1]` are the places of the states' first tokens in all block tables laid end to end.
        """
        page_tokens = self.config.page_tokens
        places = positions + bases
        pages = self._pages.view(-1).take(torch.div(places, page_tokens, rounding_mode="floor"))
        return torch.add(places.remainder(page_tokens), pages, alpha=page_tokens)


class _Bases(NamedTuple):
    """What depends on the states of a step alone."""

    state_rows: Tensor
    first_rows: Tensor
    """int32 `[T]`: first row of each request's hot buffer."""
    tokens: Tensor
    """int64 `[T, 1]`: see `_host_rows`."""


class _Targets(NamedTuple):
    """Where a step's new tokens are mirrored."""

    positions: Tensor
    source: Tensor
    host_rows: Tensor


class _Resolved(NamedTuple):
    """What the first layer of a group finds out for all of them."""

    plan: ResolvePlan
    rows: Tensor
    first_rows: Tensor
    host_rows: Tensor
