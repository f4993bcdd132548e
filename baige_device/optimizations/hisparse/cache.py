"""`HotKVCache`: the data plane of HiSparse over the op table. No engine, no chip."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.errors import BaigeError
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from baige_device.optimizations.hisparse.config import HiSparseConfig
from baige_device.optimizations.hisparse.holdings import Holdings
from baige_device.optimizations.hisparse.lane import Lane
from baige_device.registry.table import OpTable

__all__ = ["HotKVCache", "SwapIn", "SwapStats"]


@dataclass(frozen=True)
class SwapIn:
    """One layer's rows for the queries of a step. Join it before the misses are read."""

    rows: Tensor
    """int32 `[T, K]`: row of the layer's hot pool for each wanted token, -1 for padding."""
    plan: ResolvePlan
    miss_rows: Tensor
    """int32 `[T, K]`: rows of the hot pool that the transfer fills, -1 behind the count."""
    event: Any

    def missed(self, hot_rows: int) -> Tensor:
        """bool `[T, K]`: which of `rows` are still in flight. `hot_rows` is the size of the hot pool."""
        mark = torch.zeros(hot_rows + 1, dtype=torch.bool, device=self.rows.device)
        mark[self.miss_rows.long()] = True  # -1 marks the spare last entry
        mark[-1] = False
        return mark[self.rows.long()]


@dataclass(frozen=True)
class SwapStats:
    """Counts since construction; reading them synchronises."""

    wanted: int
    missed: int
    swapped_bytes: int

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.missed / self.wanted if self.wanted else 1.0


class HotKVCache:
    """A hot buffer of `hot_tokens` rows per request and layer on the device, all rows in host memory.

    A step: `begin_step`, then per layer `append` (the new tokens), `swap_in` (the indexer's top-k), attention over
    `hot[layer]` at `SwapIn.rows` after `join`. Layers of one group must be called in the same order; the first one
    resolves for all. Prompts go to the host by `store`. Rows are bytes; views of other dtypes are the caller's.

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
        self._appended: dict[int, Tensor] = {}
        self._resolved: dict[int, tuple[ResolvePlan, Tensor, Tensor, Tensor]] = {}
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
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
        """Forget the plans of the step before."""
        self._appended.clear()
        self._resolved.clear()

    def store(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Write prompt rows `[T, row_bytes]` to the host; the requests' hot buffers of this layer's group are emptied.

        `state_rows` `[T]` (-1 is padding) and `positions` `[T]` say whose and which tokens the rows are.
        """
        self._slot_keys[self.config.groups[layer], state_rows.long()] = -1  # -1 empties the spare last state
        self._mirror(layer, state_rows, positions, rows)

    def append(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Put new tokens' rows `[T, row_bytes]` into the hot buffers and mirror them to the host.

        Returns:
            int32 `[T]`: their rows in `hot[layer]`, -1 for padding.
        """
        group = self.config.groups[layer]
        if group not in self._appended:
            keys = torch.where(state_rows < 0, -1, positions).int()[:, None]
            plan = self._ops.hot_cache_resolve(keys, state_rows, self._slot_keys[group], self._lru_slots[group])
            self._appended[group] = self._hot_rows(state_rows[:, None], plan.slots)[:, 0]
        hot_rows = self._appended[group]
        self._ops.kv_write(rows[:, None], self.hot[layer][:, None, None], hot_rows)
        self._mirror(layer, state_rows, positions, rows)
        return hot_rows

    def swap_in(self, layer: int, state_rows: Tensor, topk: Tensor) -> SwapIn:
        """Bring the wanted tokens `topk` `[T, K]` (positions, -1 padding) into the hot buffer; starts the transfer.

        Rows of one request (speculative verify) share the union of their tokens, which must fit `hot_tokens`.
        """
        group = self.config.groups[layer]
        if group not in self._resolved:
            self._resolved[group] = self._resolve(group, state_rows, topk)
        plan, rows, host_rows, miss_rows = self._resolved[group]

        def transfer() -> None:
            self._ops.uva_sparse_gather(self.host[layer], self.hot[layer], host_rows, miss_rows, plan.miss_counts)

        return SwapIn(rows, plan, miss_rows, self._swap.run(transfer, after=self._backup_event))

    def join(self, swap: SwapIn) -> None:
        """Make the current stream wait for the transfer."""
        self._swap.join(swap.event)

    def stats(self) -> SwapStats:
        """Counts since construction."""
        wanted, missed = self._counts.tolist()
        return SwapStats(wanted, missed, missed * self.config.row_bytes)

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

    def _mirror(self, layer: int, state_rows: Tensor, positions: Tensor, rows: Tensor) -> None:
        host_rows = torch.where(state_rows < 0, -1, self._host_rows(state_rows[:, None], positions[:, None])[:, 0])
        source = torch.arange(rows.shape[0], device=self.device)

        def transfer() -> None:
            self._ops.uva_sparse_scatter(rows, self.host[layer], source, host_rows)

        self._backup_event = self._backup.run(transfer, rows, host_rows, source)

    def _resolve(self, group: int, state_rows: Tensor, topk: Tensor) -> tuple[ResolvePlan, Tensor, Tensor, Tensor]:
        plan = self._ops.hot_cache_resolve(topk, state_rows, self._slot_keys[group], self._lru_slots[group])
        states = state_rows[:, None]
        wanted = ((topk >= 0) & (states >= 0)).sum()
        self._counts += torch.stack([wanted, plan.miss_counts.sum()])
        rows, miss_rows = self._hot_rows(states, plan.slots), self._hot_rows(states, plan.miss_slots)
        host_rows = torch.where(plan.miss_keys < 0, -1, self._host_rows(states, plan.miss_keys.clamp_min(0)))
        return plan, rows, host_rows, miss_rows

    def _hot_rows(self, states: Tensor, slots: Tensor) -> Tensor:
        return torch.where(slots < 0, -1, states * self.config.hot_tokens + slots).int()

    def _host_rows(self, states: Tensor, positions: Tensor) -> Tensor:
        page_tokens = self.config.page_tokens
        page = self._pages[states.long(), positions.long() // page_tokens]
        return page * page_tokens + positions.long() % page_tokens
