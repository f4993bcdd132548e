"""HiSparse inside a vLLM worker: who owns which hot row, where the latent rows live, and a step's division.

vLLM's block manager stays untouched. It sees the layers with index keys only and sizes its blocks by them; the sparse
layers are entered as sharing those layers' blocks, so that they get metadata and slot mappings, and their rows live in
our host pool under the same block ids. Prefix caching, preemption and abort therefore need no counterpart here; what
a request owns on the device is one hot row, given back when it finishes or is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from baige_device.activation import Activation, current
from baige_device.engines.vllm.hisparse_options import decode_tokens
from baige_device.engines.vllm.hisparse_sizes import HostSizes, local_ranks
from baige_device.engines.vllm.paged import PagedBatch
from baige_device.errors import HostMemoryError, MountError
from baige_device.metrics import add_source, remove_source
from baige_device.optimizations.hisparse import HiSparseMetrics
from baige_device.optimizations.hisparse.layer import HotLayers
from baige_device.optimizations.hisparse.paged import PagedHotCache
from baige_device.optimizations.hisparse.setup import announce, check_host_pool
from baige_device.optimizations.hisparse.staging import Staging
from baige_device.optimizations.hisparse.step import plan_step
from baige_device.registry.table import OpTable
from baige_device.settings import HiSparseSettings

__all__ = ["Coordinator", "active", "activate"]

_active: Coordinator | None = None


def active() -> Coordinator | None:
    """The coordinator of this worker, or None while HiSparse is off."""
    return _active


def activate(vllm_config: Any, activation: Activation, device: torch.device) -> None:
    """Make this worker's coordinator, or none; nothing large is allocated yet.

    Raises:
        HostMemoryError: the host pool is larger than the node can give.
    """
    global _active
    _active = None
    settings = activation.settings.hisparse
    if settings.enabled:
        allocator = activation.resolutions["host_alloc"].chosen
        assert allocator is not None  # one of the needs that were resolved
        ranks = local_ranks(vllm_config.parallel_config)
        host_bytes = check_host_pool(settings, ranks, allocator.offer.facts)
        _active = Coordinator(vllm_config, settings, activation.ops, device, host_bytes)


class Coordinator:
    """One worker's HiSparse: sizes, pools, and the hot rows of its requests."""

    def __init__(
        self, vllm_config: Any, settings: HiSparseSettings, ops: OpTable, device: torch.device, host_bytes: int
    ) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._ops = ops
        self._device = device
        self._host_bytes = host_bytes
        self._limit = decode_tokens(vllm_config)
        self._layers: list[Any] = []
        self._input_batch: Callable[[], Any] | None = None
        self._preempted = 0
        self._metrics: HiSparseMetrics | None = None
        self.sizes: HostSizes | None = None
        self.hot: HotLayers | None = None

    def claim(self, specs: dict[str, Any], layers: Mapping[str, Any]) -> dict[str, str]:
        """Take the sparse layers out of vLLM's KV cache specs; returns which layer's blocks each of them shares.

        Raises:
            MountError: a layer whose KV is neither latent rows of ours nor index keys.
        """
        from baige_device.engines.vllm.hisparse_mla import HostSparseMlaImpl
        from baige_device.engines.vllm.indexer import IndexerBackend

        self._layers = [
            layer
            for name, layer in layers.items()
            if name in specs and isinstance(getattr(layer, "impl", None), HostSparseMlaImpl)
        ]
        sparse = {layer.layer_name: specs.pop(layer.layer_name) for layer in self._layers}
        others = [name for name in specs if layers[name].get_attn_backend() is not IndexerBackend]
        if not sparse or not specs or others:
            raise MountError(
                f"vllm: HiSparse: expected sparse-MLA layers and their index keys, got {len(sparse)} sparse layers, "
                f"{len(specs) - len(others)} layers of index keys, and others: {', '.join(others) or 'none'}"
            )
        spec = next(iter(sparse.values()))
        self.sizes = HostSizes.of(
            self._vllm_config,
            self._host_bytes,
            _index_groups(self._layers),
            spec.head_size * spec.dtype.itemsize,
            sum(item.page_size_bytes for item in specs.values()),
        )
        return dict.fromkeys(sparse, next(iter(specs)))

    def kv_budget_bytes(self, device_bytes: int) -> int:
        """What vLLM may plan its blocks with, of `device_bytes` for all KV; logs the plan.

        Raises:
            HostMemoryError: host pool or device do not hold one request of the longest context, or the host pool does
                not hold `--num-gpu-blocks-override`.
        """
        assert self.sizes is not None
        model = self._vllm_config.model_config
        fits_itself = getattr(model, "original_max_model_len", None) == -1
        needed = self.sizes.block_tokens if fits_itself else self.sizes.max_context_tokens
        blocks, text = self.sizes.blocks(device_bytes, needed)
        self._refuse_more_blocks(self._vllm_config.cache_config.num_gpu_blocks_override or 0)
        gather = current().resolutions["uva_sparse_gather"].chosen
        assert gather is not None  # one of the needs that were resolved
        ranks = local_ranks(self._vllm_config.parallel_config)
        plan = self.sizes.plan(self._settings, ranks, device_bytes, gather.offer.facts)
        announce(plan, self.sizes.max_context_tokens, text)
        return blocks * self.sizes.index_block_bytes

    def allocate(self, blocks: int, input_batch: Callable[[], Any]) -> None:
        """Make the pools for vLLM's final number of blocks and hand every sparse layer its host rows.

        `input_batch` gives the runner's batch, whose order of requests is that of a step's metadata.

        Raises:
            HostMemoryError: more blocks than the host pool was planned for.
        """
        assert self.sizes is not None
        self._refuse_more_blocks(blocks)
        self.close()
        staging = Staging(self._ops, self.sizes.staged_tokens, self.sizes.row_bytes, self._device)
        cache = PagedHotCache(self.sizes.config(blocks), self._ops, self._device)  # last: it needs closing
        self.hot = HotLayers(cache, staging, self._ops, overlap=self._settings.overlap)
        self._input_batch = input_batch
        self._metrics = HiSparseMetrics(cache.totals, cache.stall)
        add_source(self._metrics)
        for index, layer in enumerate(self._layers):
            layer.kv_cache = cache.host_view(index, self._vllm_config.model_config.dtype)
            layer.impl.bind(self.hot, index)

    def _refuse_more_blocks(self, blocks: int) -> None:
        assert self.sizes is not None
        if blocks > self.sizes.host_blocks:
            raise HostMemoryError(
                f"hisparse.host_gib_per_node: expected room for the {blocks} blocks of vLLM (num_gpu_blocks_override), "
                f"got {self.sizes.host_blocks} on this rank; override less or raise it"
            )

    def observe(self, scheduler_output: Any) -> None:
        """Take back the hot rows of requests that finished, were aborted or preempted; a resumed one starts empty."""
        if self.hot is None:
            return
        preempted = scheduler_output.preempted_req_ids or ()
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        released = {name for name in (*preempted, *resumed) if self.hot.cache.release(name)}
        self._preempted += len(released)
        for request in scheduler_output.finished_req_ids:
            self.hot.cache.release(request)
        if self._metrics is not None:
            self._metrics.observe(hot_rows_free=self.hot.cache.free_requests)

    def begin(self, batch: PagedBatch, starts: Sequence[int], contexts: Sequence[int]) -> None:
        """Divide a step's batch before its first layer runs; `starts` and `contexts` are its lengths on the host."""
        assert self.hot is not None
        assert self._input_batch is not None
        requests = list(self._input_batch().req_ids[: batch.num_reqs])
        requests += [None] * (batch.num_reqs - len(requests))
        states = self.hot.cache.adopt(requests)
        plan = plan_step(states, batch.query_start_loc, batch.seq_lens, starts, contexts, self._limit)
        self.hot.begin(plan, states, batch.block_table)

    def report(self) -> dict[str, Any]:
        """Counts of this worker, for `baige_report`; synchronises."""
        if self.hot is None:
            return {}
        cache = self.hot.cache
        stats = cache.stats()
        return {
            "wanted": stats.wanted,
            "missed": stats.missed,
            "hits": stats.wanted - stats.missed,
            "swapped_bytes": stats.swapped_bytes,
            "hot_tokens": cache.config.hot_tokens,
            "hot_rows": cache.config.max_requests,
            "free_hot_rows": cache.free_requests,
            "host_blocks": cache.config.host_pages,
            "groups": list(cache.config.groups),
            "overlap": self._settings.overlap,
            "preempted": self._preempted,
        }

    def close(self) -> None:
        """Free the pools."""
        if self.hot is not None:
            hot, self.hot = self.hot, None
            if self._metrics is not None:
                remove_source(self._metrics)
            for layer in self._layers:
                layer.kv_cache = torch.tensor([])
                layer.impl.bind(None, 0)
            hot.cache.close()


def _index_groups(layers: Sequence[Any]) -> list[int]:
    """Group of each layer: one without an indexer uses the top-k of the last one before it that has one."""
    groups: list[int] = []
    for layer in layers:
        leads = not groups or layer.indexer is not None
        groups.append(len(groups) if leads else groups[-1])
    return groups
