"""One decode batch, with all KV on the device, with SGLang's hot buffer and with ours: the same rows and lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from baige_device.backends.cuda.flash_mla import sparse_attention
from baige_device.backends.cuda.gather import uva_sparse_gather, uva_sparse_scatter
from baige_device.backends.cuda.resolve import hot_cache_resolve
from baige_device.backends.portable.kv_write import kv_write
from baige_device.backends.portable.merge_attention import merge_attention
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.optimizations.hisparse import HiSparseConfig, HotKVCache, SwapIn
from baige_device.optimizations.hisparse.attend import attend_hot
from benchmarks.bench_sparse_attention import fp8_rows
from benchmarks.hisparse_layer import HOT_TOKENS, ROW_BYTES, SCALE, TOPK, DsaLayer, topk_stream
from benchmarks.hisparse_peer import SglangSwapIn, sglang_available
from benchmarks.host_pool import filled_buffer

__all__ = ["INDEX_ROW_BYTES", "Scene"]

INDEX_ROW_BYTES = 132
"""The indexer's key of a token: 128 fp8 and one fp32 scale."""
_Result = tuple[Tensor, Tensor]


@functools.lru_cache(maxsize=1)
def _layer() -> DsaLayer:
    return DsaLayer()


@functools.lru_cache(maxsize=1)
def _random_rows() -> Tensor:
    return fp8_rows(400_000).view(-1, ROW_BYTES)


@functools.lru_cache(maxsize=2)
def _host_pool(registered: bool = False) -> Tensor:
    """Host memory full of random fp8 rows, which the scenes of a process share: making it takes seconds.

    Both kinds hold the same rows. SGLang's kernel gets registered memory, as SGLang makes it.
    """
    return filled_buffer(_random_rows(), registered=registered).tensor


_OPS: Any = SimpleNamespace(
    host_alloc=lambda num_bytes: HostBuffer(_host_pool()[:num_bytes], "managed"),
    hot_cache_resolve=hot_cache_resolve,
    kv_write=kv_write,
    merge_attention=merge_attention,
    sparse_attention=sparse_attention,
    uva_sparse_gather=uva_sparse_gather,
    uva_sparse_scatter=uva_sparse_scatter,
)
"""The ops of the CUDA backend, but that all caches of this process share one host pool."""


class Scene:
    """A batch of requests of `context` tokens that each miss `misses` of 2048 rows in every step."""

    def __init__(self, batch: int, misses: int, context: int) -> None:
        self.batch, self.misses, self.context = batch, misses, context
        self.layer = _layer()
        self.topk = topk_stream(batch, misses, context)
        used_bytes = batch * context * ROW_BYTES
        self.host = _host_pool()[:used_bytes].view(-1, ROW_BYTES)
        theirs = _host_pool(registered=True)[:used_bytes].view(-1, ROW_BYTES)
        self.rows = theirs.to("cuda", non_blocking=True)
        self.q_a = torch.randn(batch, 1536, device="cuda").bfloat16()
        self._lists = [wanted + torch.arange(batch, device="cuda", dtype=torch.int32)[:, None] * context
                       for wanted in self.topk]  # fmt: skip
        self.cache = self._make_cache()
        self._states = self.cache.state_rows(list(range(batch)))
        self.sglang = SglangSwapIn(theirs, batch, context) if sglang_available() else None
        self._index_keys: Tensor | None = None
        self.halves = [slice(0, batch // 2), slice(batch // 2, batch)]
        self._half_states = [self._states[part].clone() for part in self.halves]

    @property
    def miss_width(self) -> int:
        return -(-self.misses // 64) * 64

    def _make_cache(self) -> HotKVCache:
        config = HiSparseConfig(
            num_layers=1, row_bytes=ROW_BYTES, topk=TOPK, hot_tokens=HOT_TOKENS, max_requests=self.batch,
            max_context_tokens=self.context, host_tokens=self.batch * self.context,
        )  # fmt: skip
        cache = HotKVCache(config, _OPS, torch.device("cuda", 0))
        for request in range(self.batch):
            assert cache.admit(request, self.context)
        return cache

    def attend(self, q: Tensor, pool: Tensor, lists: Tensor) -> _Result:
        result: _Result = _OPS.sparse_attention(
            q, pool[:, None], None, lists[:, None], scale=SCALE, v_dim=512, kv_format="fp8_ds_mla"
        )
        return result

    def on_device(self, index: int, *, indexer: bool = False) -> _Result:
        """The step with all KV on the device."""
        if indexer:
            self.score(slice(None))
        out, lse = self.attend(self.layer.queries(self.q_a), self.rows, self._lists[index])
        self.layer.output(out)
        return out, lse

    def with_sglang(self, index: int) -> _Result:
        """The step with SGLang's fused resolve and copy."""
        assert self.sglang is not None
        q = self.layer.queries(self.q_a)
        out, lse = self.attend(q, self.sglang.rows, self.sglang(self.topk[index]))
        self.layer.output(out)
        return out, lse

    def swapped(
        self,
        index: int,
        *,
        early: bool = False,
        overlap: bool = False,
        waves: Sequence[int] = (),
        indexer: bool = False,
        max_sms: int = 0,
    ) -> _Result:
        """The step with our hot buffer; `early` starts the swap in front of the query projection."""
        self._begin(index)
        if indexer:
            self.score(slice(None))
        q = None if early else self.layer.queries(self.q_a)
        swap = self.cache.swap_in(0, self._states, self.topk[index], waves=waves, part=index, max_sms=max_sms)
        return self._finish(index, self.layer.queries(self.q_a) if q is None else q, swap, overlap)

    def in_halves(self, index: int, *, max_sms: int = 0) -> _Result:
        """The step with overlap where each half of the batch is swapped in as soon as its top-k is known."""
        self._begin(index)
        swaps = []
        for number, part in enumerate(self.halves):
            self.score(part)
            wanted, states = self.topk[index][part], self._half_states[number]
            swaps.append(self.cache.swap_in(0, states, wanted, part=2 * index + number, max_sms=max_sms))
        return self._finish(index, self.layer.queries(self.q_a), swaps, True)

    # A captured run of all lists stands for the layers of one model step: what is computed once a step is so here.
    def _begin(self, index: int) -> None:
        if index == 0 or not torch.cuda.is_current_stream_capturing():
            self.cache.begin_step()

    def _finish(self, index: int, q: Tensor, swap: SwapIn | Sequence[SwapIn], overlap: bool) -> _Result:
        out, lse = attend_hot(
            self.cache,
            _OPS,
            0,
            q,
            swap,
            scale=SCALE,
            v_dim=512,
            kv_format="fp8_ds_mla",
            overlap=overlap,
            miss_width=self.miss_width if overlap else 0,
        )
        self.layer.output(out)
        if index == len(self.topk) - 1 or not torch.cuda.is_current_stream_capturing():
            self.cache.end_step()
        return out, lse

    def score(self, part: slice) -> None:
        """In place of the indexer: read its keys once, the least that scoring can take."""
        if self._index_keys is None:
            words = self.context * INDEX_ROW_BYTES // 4
            self._index_keys = torch.randint(0, 1 << 30, (self.batch, words), dtype=torch.int32, device="cuda")
        self._index_keys[part].amax(1)

    def verify(self) -> None:
        """Rows of the hot buffers and outputs of every way equal those of the step with all KV on the device.

        Raises:
            AssertionError: they do not.
        """
        for index in range(len(self.topk)):
            self.swapped(index)  # from here on every step misses what it is meant to
            if self.sglang is not None:
                self.sglang(self.topk[index])
        ways: list[Callable[[int], _Result]] = [
            self.swapped,
            partial(self.swapped, early=True),
            partial(self.swapped, early=True, overlap=True, max_sms=6),
            partial(self.swapped, early=True, overlap=True, waves=self.waves(), max_sms=4),
            partial(self.in_halves, max_sms=6),
        ]
        for index, way in enumerate(ways):
            self._compare(f"way {index}", way(index), self.on_device(index))
        if self.sglang is not None:
            self._compare("SGLang", self.with_sglang(0), self.on_device(0))
        self.cache.begin_step()
        swap = self.cache.swap_in(0, self._states, self.topk[len(ways)])
        self.cache.join(swap)
        held, want = self.cache.hot[0][swap.rows.flatten()], self.rows[self._lists[len(ways)].flatten()]
        assert torch.equal(held, want), "rows of the hot buffer differ from the host's"
        assert swap.plan.miss_counts.tolist() == [self.misses] * self.batch, "unexpected misses"
        self.cache.end_step()

    def _compare(self, name: str, got: _Result, right: _Result) -> None:
        for value, want in zip(got, right, strict=True):
            error = ((value.float() - want.float()).abs() / (1 + want.float().abs())).max().item()
            assert error < 2e-2, f"{name}: error {error:.1e}, limit 2e-2"

    def waves(self) -> tuple[int, ...]:
        """Three quarters of the batch, then the rest: what is left to do behind the last row is then short."""
        last = self.batch // 4
        return (self.batch - last, last)
