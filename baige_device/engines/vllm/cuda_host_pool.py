"""HiSparse's host pool on NVIDIA: managed memory of `host_alloc`, which the device reads through large pages.

The host registers ordinary memory, whose rows the device reads at half the rate once the pool is large (docs/cuda.md).
Managed memory is no pinned memory to the host's compiled kernels, which look it up and refuse, and the driver's batched
copies of it are slow; so with it the rows of a prefill are staged by `uva_sparse_gather`, and rows and pages go to the
host through the host's own Triton copy. What `host_alloc` gives otherwise is no better than the host's own, which stays
then; so does a pool that ranks share, which is one mapping of all their processes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from baige_device.engines.vllm.hisparse_options import CONNECTOR
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.errors import BackendError
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.registry.resolve import Candidate
from baige_device.registry.table import OpTable

__all__ = ["mount_host_pool", "serves_pool"]

logger = logging.getLogger("baige_device")

ALLOCATE = "vllm.v1.hisparse.runtime:HiSparseHostPool.allocate"
RELEASE = (
    "vllm.v1.hisparse.binding:release_pinned_state",
    "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker:release_pinned_state",
)
STAGE = "vllm.v1.hisparse.runtime:HiSparseRuntime.gather_prefill_cache"
WIDEN = "vllm._custom_ops:cp_gather_and_upconvert_fp8_kv_cache"
COPY = "vllm._custom_ops:swap_blocks_batch"
TRITON_COPY = "vllm.v1.kv_offload.cpu.swap_blocks_triton:_swap_blocks_kernel"
LEAST_STAGED = "vllm.v1.hisparse.runtime:_MIN_STAGED_PREFILL_KV_ROWS"

_COPY_SMS = 12
"""Programs of the host's Triton copy, as the host starts it."""
_RESIDENT_SMS = 64
"""Multiprocessors that copy resident rows of a prefill beside its own, from device memory to device memory."""
_CHUNK_BYTES = 8192

_STAGED_ROWS = 16384
"""The staging buffer grows by so many rows."""
_staging: Tensor | None = None
_buffers: dict[int, HostBuffer] = {}
"""The memory of each live pool of ours, by its address."""


def serves_pool(vllm_config: Any, host_alloc: Candidate | None) -> bool:
    """Whether the pool of this start is to be ours: the chosen `host_alloc` gives managed memory, and nobody but
    HiSparse itself works on the pool. Another connector (NIXL, Mooncake) registers it for its network."""
    if host_alloc is None or host_alloc.offer.facts.get("kind") != "managed":
        return False
    transfer = vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    if connector != CONNECTOR:
        logger.info("vllm: HiSparse: the host pool stays vLLM's own, since %s may register it", connector)
    return connector == CONNECTOR


def mount_host_pool(features: Any) -> None:
    """Give the host's pool memory from `host_alloc`, and take care of it where the host's kernels cannot."""
    for used in (TRITON_COPY, LEAST_STAGED):
        LEDGER.note_seam(used)
    LEDGER.patch(ALLOCATE, functools.partial(allocating, features.ops))
    for target in RELEASE:
        LEDGER.patch(target, releasing)
    LEDGER.patch(STAGE, functools.partial(staging, features.ops))
    LEDGER.patch(WIDEN, functools.partial(widening, features.ops))
    LEDGER.patch(COPY, copying)


def allocating(ops: OpTable, original: Any) -> Any:
    """`HiSparseHostPool.allocate` with memory of ours."""

    def allocate(self: Any, size: int) -> Any:
        from vllm.v1.hisparse.runtime import check_hisparse_host_memory

        if self.backing is None and not self.kv_cache_config.hisparse_shared_host_pool:
            check_hisparse_host_memory(size)
            buffer = ops.host_alloc(size)
            if buffer.kind == "managed":
                self.backing = self.registered = buffer.tensor.view(torch.int8)
                _buffers[self.backing.data_ptr()] = buffer
            else:
                buffer.close()
        return original(self, size)

    return allocate


def releasing(original: Any) -> Any:
    """`release_pinned_state`, which would unregister what was never registered."""

    def release_pinned_state(
        runtimes: list[Any], pinned_host_pools: list[Tensor], shared_host_region: Any = None
    ) -> None:
        ours = [pool.data_ptr() for pool in pinned_host_pools if pool.data_ptr() in _buffers]
        pinned_host_pools[:] = [pool for pool in pinned_host_pools if pool.data_ptr() not in _buffers]
        try:
            original(runtimes, pinned_host_pools, shared_host_region)
        finally:
            for address in ours:
                _close(_buffers.pop(address))

    return release_pinned_state


def _close(buffer: HostBuffer) -> None:
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        buffer.close()
    except (BackendError, RuntimeError) as error:
        # As the host does: with a context that is beyond use, the memory goes with the process.
        logger.warning("vllm: HiSparse: the host pool is left to the end of the process: %s", error)


def staging(ops: OpTable, original: Any) -> Any:
    """`HiSparseRuntime.gather_prefill_cache` out of memory that the host's kernel refuses."""

    def gather_prefill_cache(self: Any, kv_cache: Tensor, plan: Any, resident_cache: Tensor | None = None) -> Any:
        if not _is_ours(kv_cache.data_ptr()):
            return original(self, kv_cache, plan, resident_cache)
        from vllm.v1.hisparse import runtime

        width, resident_rows = kv_cache.shape[-1], None
        if resident_cache is not None and plan.gpu_row_ids is not None:
            resident_cache, resident_rows = resident_cache.view(kv_cache.dtype), plan.gpu_row_ids[0]
        rows = max(plan.row_ids.shape[1], runtime._MIN_STAGED_PREFILL_KV_ROWS)
        staged = kv_cache.new_empty((rows, width), device=plan.row_ids.device)[: plan.row_ids.shape[1]]
        stage_rows(ops, staged, kv_cache.view(-1, width), plan.row_ids[0], resident_cache, resident_rows)
        return staged.view(-1, plan.block_size, width)

    return gather_prefill_cache


def widening(ops: OpTable, original: Any) -> Any:
    """`cp_gather_and_upconvert_fp8_kv_cache`, whose rows are staged on the device first, page by page."""

    def cp_gather_and_upconvert_fp8_kv_cache(
        src_cache: Tensor,
        dst: Tensor,
        block_table: Tensor,
        workspace_starts: Tensor,
        batch_size: int,
        seq_starts: Tensor | None = None,
        host_cache: Tensor | None = None,
        host_row_ids: Tensor | None = None,
        device_row_ids: Tensor | None = None,
    ) -> None:
        if host_cache is None or not _is_ours(host_cache.data_ptr()):
            maps = {"host_cache": host_cache, "host_row_ids": host_row_ids, "device_row_ids": device_row_ids}
            original(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, **maps)
            return
        assert host_row_ids is not None
        assert device_row_ids is not None
        _, page_rows, width = src_cache.shape
        most = dst.shape[0] // page_rows + batch_size + 1  # the chunk's full pages, its tails, and the null page
        pages, table = chosen_pages(block_table, host_row_ids.numel() // page_rows, most)
        host_rows, device_rows = (rows_of_pages(rows, pages, page_rows) for rows in (host_row_ids, device_row_ids))
        staged = staging_buffer(len(host_rows), width, dst.device)
        stage_rows(ops, staged, host_cache, host_rows, src_cache.view(staged.dtype), device_rows)
        staged_pages = staged.view(-1, page_rows, width).view(src_cache.dtype)
        original(staged_pages, dst, table, workspace_starts, batch_size, seq_starts)

    return cp_gather_and_upconvert_fp8_kv_cache


def chosen_pages(block_table: Tensor, num_pages: int, most: int) -> tuple[Tensor, Tensor]:
    """The pages of `[0, num_pages)` that a table `[B, M]` names, which are at most `most`, and the table over them.

    A prefill's rows are listed for all its requests, and a chunk of it needs those of its own. Nothing waits for the
    device, so the list is `most` long, with -1 behind its end.
    """
    named = torch.zeros(num_pages, dtype=torch.int64, device=block_table.device)
    named.index_fill_(0, block_table.flatten().long(), 1)
    places = named.cumsum(0) - 1
    pages = torch.full((most + 1,), -1, dtype=torch.int64, device=block_table.device)
    # What is not named is written behind the end.
    pages.scatter_(0, torch.where(named > 0, places, most), torch.arange(num_pages, device=block_table.device))
    return pages[:most], places[block_table.long()].to(block_table.dtype)


def rows_of_pages(rows: Tensor, pages: Tensor, page_rows: int) -> Tensor:
    """What `rows` says of each row of some pages, page by page; -1 for a page -1."""
    chosen = rows.view(-1, page_rows)[pages.clamp(min=0)]
    return torch.where(pages[:, None] < 0, -1, chosen).flatten()


def staging_buffer(rows: int, width: int, device: torch.device) -> Tensor:
    """uint8 `[rows, width]` of a buffer that all layers share, as they share the workspace that it is widened into.

    The host's layers run on many streams, each behind the one before; a buffer of its own for each would stay with the
    allocator for each stream.
    """
    global _staging
    if _staging is None or _staging.numel() < rows * width or _staging.device != device:
        if _staging is not None and _staging.is_cuda:
            _staging.record_stream(torch.cuda.current_stream(device))
        _staging = torch.empty(-(-rows // _STAGED_ROWS) * _STAGED_ROWS * width, dtype=torch.uint8, device=device)
    return _staging[: rows * width].view(rows, width)


def stage_rows(
    ops: OpTable,
    staged: Tensor,
    host: Tensor,
    host_rows: Tensor,
    resident: Tensor | None,
    resident_rows: Tensor | None,
) -> None:
    """Fill `staged` `[U, W]` from the device pool `resident` `[P, N, W]` where `resident_rows` is not -1, else from
    `host` `[S, W]`. A row with -1 in both is left as it is."""
    places = torch.arange(len(host_rows), dtype=torch.int32, device=host_rows.device)
    wanted = host_rows >= 0
    if resident is not None and resident_rows is not None:
        at_hand = resident_rows >= 0
        wanted &= ~at_hand
        there = torch.where(at_hand, places, -1)
        ops.uva_sparse_gather(resident, staged, resident_rows, there, max_sms=_RESIDENT_SMS)
    ops.uva_sparse_gather(host, staged, host_rows, torch.where(wanted, places, -1))


def copying(original: Any) -> Any:
    """`swap_blocks_batch` to or from memory that the driver's batched copies are slow in."""

    def swap_blocks_batch(
        src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False
    ) -> None:
        copies = src_ptrs.numel()
        if copies == 0 or not (_is_ours(int(dst_ptrs[0])) or _is_ours(int(src_ptrs[0]))):
            original(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)
            return
        launch_copies(*on_device(src_ptrs, dst_ptrs, sizes))

    return swap_blocks_batch


def on_device(*lists: Tensor) -> tuple[Tensor, ...]:
    """Host tensors of one shape on the device, through pinned memory: from pageable memory the host would wait for all
    that its stream waits for."""
    return torch.stack(lists).pin_memory().to("cuda", non_blocking=True).unbind()


def launch_copies(src_addresses: Tensor, dst_addresses: Tensor, sizes: Tensor) -> None:
    """Queue copies between addresses, int64 `[N]` on the device each, sizes in multiples of 8 bytes."""
    from vllm.v1.kv_offload.cpu.swap_blocks_triton import _swap_blocks_kernel

    copies = src_addresses.numel()
    grid = (min(_COPY_SMS, copies),)
    _swap_blocks_kernel[grid](src_addresses, dst_addresses, sizes, copies, BYTES_PER_CHUNK=_CHUNK_BYTES)


def _is_ours(address: int) -> bool:
    """Whether an address lies in a pool of ours."""
    return any(0 <= address - start < buffer.tensor.numel() for start, buffer in list(_buffers.items()))
