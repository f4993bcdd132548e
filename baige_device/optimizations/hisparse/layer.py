"""One layer's step over a paged hot cache: rows in, attention out, decodes and prompt chunks of one batch together."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.optimizations.hisparse.attend import attend_hot
from baige_device.optimizations.hisparse.paged import PagedHotCache
from baige_device.optimizations.hisparse.staging import Staging
from baige_device.optimizations.hisparse.step import StepPlan
from baige_device.registry.table import OpTable

__all__ = ["HotLayers", "as_rows"]


class HotLayers:
    """What an engine's attention layers call: `write` and then `attend`, layer after layer, between two `begin`s."""

    def __init__(self, cache: PagedHotCache, staging: Staging, ops: OpTable, *, overlap: bool) -> None:
        self.cache = cache
        self._staging = staging
        self._ops = ops
        self._overlap = overlap
        self._plan = StepPlan(None, None, ())
        self._contexts: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the step, without padding of the batch."""
        sets = (self._plan.decode, self._plan.prompt)
        return sum(part.states.shape[0] for part in sets if part is not None)

    def begin(self, plan: StepPlan, states: Tensor, block_table: Tensor) -> None:
        """Start a step of requests with hot rows `states` int32 `[B]` and the engine's `block_table` `[B, M]`."""
        self.cache.begin_step()
        self.cache.set_pages(states, block_table)
        self._plan = plan
        self._contexts = tuple(self.cache.host_rows(block_table[chunk.request], chunk.before) for chunk in plan.chunks)

    def write(self, layer: int, rows: Tensor) -> None:
        """Take this step's new rows, uint8 `[T, row_bytes]`: all to the host, those of decodes to the hot buffers."""
        plan = self._plan
        if plan.prompt is not None:
            self.cache.store(layer, plan.prompt.states, plan.prompt.positions, plan.prompt.of(rows))
        if plan.decode is not None:
            self.cache.append(layer, plan.decode.states, plan.decode.positions, plan.decode.of(rows))

    def attend(self, layer: int, q: Tensor, rows: Tensor, topk: Tensor, *, scale: float, v_dim: int) -> Tensor:
        """MLA attention of `q` `[T, H, D]` over each token's positions `topk` int32 `[T, K]`; `[T, H, v_dim]`.

        `rows` are those given to `write`. Misses of decodes fly while the prompt chunks are attended.
        """
        plan, cache = self._plan, self.cache
        if plan.decode is None:
            out = q.new_empty(*q.shape[:2], v_dim)
            self._attend_chunks(layer, q, rows, topk, out, scale, v_dim)
            return out
        swap = cache.swap_in(layer, plan.decode.states, plan.decode.of(topk))
        query = plan.decode.of(q)
        if plan.prompt is None:
            return attend_hot(cache, self._ops, layer, query, swap, scale=scale, v_dim=v_dim, overlap=self._overlap)[0]
        out = q.new_empty(*q.shape[:2], v_dim)
        self._attend_chunks(layer, q, rows, topk, out, scale, v_dim)
        hot = attend_hot(cache, self._ops, layer, query, swap, scale=scale, v_dim=v_dim, overlap=self._overlap)[0]
        assert plan.decode.index is not None
        out[plan.decode.index] = hot
        return out

    def _attend_chunks(
        self, layer: int, q: Tensor, rows: Tensor, topk: Tensor, out: Tensor, scale: float, v_dim: int
    ) -> None:
        if any(chunk.before for chunk in self._plan.chunks):
            self.cache.wait_for_backup()  # of this step as well: a prefix may be another request's new page
        for chunk, context in zip(self._plan.chunks, self._contexts, strict=True):
            part = chunk.tokens
            out[part] = self._staging.attend(
                self.cache.host[layer], context, q[part], rows[part], topk[part], scale=scale, v_dim=v_dim
            )


def as_rows(*parts: Tensor) -> Tensor:
    """Columns of a token side by side, as bytes: `[T, ...]` tensors of one dtype -> uint8 `[T, row_bytes]`."""
    return torch.cat([part.flatten(1) for part in parts], dim=1).view(torch.uint8)
