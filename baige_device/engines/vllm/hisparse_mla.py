"""Sparse MLA whose rows live on the host: backend, metadata and layer of HiSparse on our platform."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context

from baige_device.engines.vllm import hisparse
from baige_device.engines.vllm.mla import joined_query
from baige_device.engines.vllm.paged import PagedBatch, PagedBatchBuilder
from baige_device.engines.vllm.sparse_mla import SparseMlaBackend, SparseMlaImpl
from baige_device.optimizations.hisparse.layer import HotLayers, as_rows

__all__ = ["HostSparseMlaBackend", "HostSparseMlaImpl"]


class HostBatchBuilder(PagedBatchBuilder):
    """The batch, and the coordinator's division of it. Built once a step, before the first layer."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedBatch:
        batch = super().build(common_prefix_len, common_attn_metadata, fast_build)
        coordinator = hisparse.active()
        assert coordinator is not None
        step = common_attn_metadata
        # Exact, not a bound: nothing is scheduled before the last step's tokens are known (no asynchronous scheduling).
        coordinator.begin(batch, step.query_start_loc_cpu.tolist(), step.seq_lens_cpu_upper_bound.tolist())
        return batch


class HostSparseMlaBackend(SparseMlaBackend):
    """Chosen for `BAIGE_MLA_SPARSE` while HiSparse is on."""

    @staticmethod
    def get_builder_cls() -> type[HostBatchBuilder]:
        return HostBatchBuilder

    @staticmethod
    def get_impl_cls() -> type[HostSparseMlaImpl]:
        return HostSparseMlaImpl


class HostSparseMlaImpl(SparseMlaImpl):
    """One layer. The coordinator binds it to the pools when they exist; before that the host only profiles."""

    rows_on_host = True
    _hot: HotLayers | None = None
    _index = 0
    _rows: Tensor | None = None

    def bind(self, hot: HotLayers | None, index: int) -> None:
        """Serve as layer `index` of these pools; None before they are freed."""
        self._hot, self._index, self._rows = hot, index, None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Send the rows of `[T, R]` and `[T, 1, P]` to the host pool, those of decodes to the hot buffers as well."""
        if self._hot is None or get_forward_context().attn_metadata is None:
            return  # a profiling run, or a dummy batch beside other data-parallel ranks: the plan is the last step's
        self._rows = as_rows(kv_c_normed, k_pe)[: self._hot.tokens]
        self._hot.write(self._index, self._rows)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: PagedBatch, layer: Any
    ) -> tuple[Tensor, None]:
        """Attend absorbed queries `[T, H, R+P]` over hot rows, and those of prompt chunks over staged ones."""
        query, buffer, rows = joined_query(q), self.topk_indices_buffer, self._rows
        assert buffer is not None
        assert self._hot is not None
        assert rows is not None
        self._rows = None
        topk = buffer[: query.shape[0]]
        out = self._hot.attend(self._index, query, rows, topk, scale=self.scale, v_dim=self.kv_lora_rank)
        return out, None
