"""SGLang's swap-in functions over `hot_cache_resolve` and `uva_sparse_gather`, one for one.

Each has the name, the arguments and the effects on SGLang's tables of the CUDA kernel that it replaces (module
`sglang.kernels.ops.kvcache.hisparse`). `block_size`, `num_blocks` and `page_size` are launch options of those kernels
and have no meaning here. Tokens that are wanted twice are loaded once, and a padded output entry is -1, on every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.activation import current
from baige_device.engines.sglang.hisparse_counts import COUNTS
from baige_device.engines.sglang.hisparse_resolve import Resolved, Step, Tables, make_step, resolve
from baige_device.engines.sglang.hisparse_rows import dsv4_rows, token_rows
from baige_device.errors import MountError
from baige_device.optimizations.hisparse.lane import Lane

__all__ = [
    "Deferred",
    "Pair",
    "copy_cache_planned_mla",
    "copy_misses",
    "deferred_copies",
    "load_blocks_to_device_buffer_mha",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "pair_bytes",
    "transfer_cache_dsv4_mla",
]

Pair = tuple[Tensor, Tensor]
"""A host pool and a device pool with the same row numbers, as `uva_sparse_gather` takes them."""


@dataclass
class Deferred:
    """Copies that run beside the current stream until they are joined."""

    lane: Lane
    missed: Tensor | None = None
    """bool `[B, N]`: which of the returned rows are in flight; None when nothing was copied."""
    event: Any = None

    def join(self) -> None:
        """Make the current stream wait for the copies."""
        self.lane.join(self.event)


_deferred: Deferred | None = None


@contextmanager
def deferred_copies(lane: Lane) -> Iterator[Deferred]:
    """Within the block a swap-in starts its copies on `lane` and does not wait for them; the caller joins."""
    global _deferred
    assert _deferred is None, "swap-ins are not nested"
    _deferred = Deferred(lane)
    try:
        yield _deferred
    finally:
        _deferred = None


def load_cache_to_device_buffer_mla(
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: Tensor | None = None,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """Swap one layer's top-k tokens `[B, K]` into the hot buffers; their device rows go to `top_k_device_locs`."""
    pairs = _token_pairs(host_cache, device_buffer, item_size_bytes)
    tables = Tables(device_buffer_tokens, device_buffer_locs, host_cache_locs, lru_slots[:, :hot_buffer_size])
    step = make_step(top_k_tokens[:, :num_top_k], req_pool_indices, seq_lens, num_real_reqs)
    resolved = _swap(tables, step, pairs, top_k_device_locs, skip_io)
    _record(resolved, miss_src, miss_dst, miss_count)


def load_cache_to_device_buffer_dsv4_mla(
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: Tensor | None = None,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """The same for DeepSeek V4's page-padded C4 pools, whose tokens are a value and a scale apart."""
    pairs = _dsv4_pairs(host_cache, device_buffer)
    tables = Tables(device_buffer_tokens, device_buffer_locs, host_cache_locs, lru_slots[:, :hot_buffer_size])
    step = make_step(top_k_tokens[:, :num_top_k], req_pool_indices, seq_lens, num_real_reqs)
    resolved = _swap(tables, step, pairs, top_k_device_locs, skip_io)
    _record(resolved, miss_src, miss_dst, miss_count)


def load_blocks_to_device_buffer_mha(
    top_k_blocks: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache_k: Tensor,
    host_cache_v: Tensor,
    device_buffer_k: Tensor,
    device_buffer_v: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    hot_buffer_size: int,
    sparse_block_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """The same for keys and values, selected by blocks of tokens `[B, K]`; residency stays by token."""
    offsets = torch.arange(sparse_block_size, dtype=torch.int32, device=top_k_blocks.device)
    blocks = top_k_blocks.int()[:, :, None]
    tokens = torch.where(blocks < 0, -1, blocks * sparse_block_size + offsets).flatten(1)
    pairs = [
        *_token_pairs(host_cache_k, device_buffer_k, item_size_bytes),
        *_token_pairs(host_cache_v, device_buffer_v, item_size_bytes),
    ]
    tables = Tables(device_buffer_tokens, device_buffer_locs, host_cache_locs, lru_slots[:, :hot_buffer_size])
    step = make_step(tokens, req_pool_indices, seq_lens, num_real_reqs)
    _swap(tables, step, pairs, top_k_device_locs, skip_io)


def copy_cache_planned_mla(
    *,
    miss_src: Tensor,
    miss_dst: Tensor,
    miss_count: Tensor,
    num_real_reqs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    item_size_bytes: int,
    num_blocks: int = 4,
    block_size: int = 1024,
    is_dsv4_layout: bool = False,
    skip_io: bool = False,
) -> None:
    """Replay the recorded copies of a layer for another one that shares its top-k."""
    if skip_io:
        return
    if is_dsv4_layout:
        pairs = _dsv4_pairs(host_cache, device_buffer)
    else:
        pairs = _token_pairs(host_cache, device_buffer, item_size_bytes)
    rows = torch.arange(miss_count.shape[0], device=miss_count.device)
    counts = torch.where(rows < num_real_reqs, miss_count, 0)
    copy_misses(pairs, miss_src, miss_dst, counts)
    COUNTS.add_copies(counts, pair_bytes(pairs), replayed=True)


def transfer_cache_dsv4_mla(
    src_ptrs: Tensor, dst_ptrs: Tensor, src_indices: Tensor, dst_indices: Tensor, block_size: int = 1024
) -> None:
    """Refused: it names pools by raw addresses, and no op of ours reads memory that it was not given as a tensor."""
    raise MountError(
        "sglang: HiSparse of DeepSeek V4: transfer_cache_dsv4_mla copies between raw addresses, which baige-device "
        "does not serve; its KV pool is refused on out-of-tree platforms, too. Start without --enable-hisparse"
    )


def copy_misses(pairs: Sequence[Pair], miss_src: Tensor, miss_dst: Tensor, counts: Tensor) -> None:
    """Copy `[B, M]` rows from host to device pools, as many of each request as `counts` `[B]` says."""
    ops = current().ops
    for host, device in pairs:
        ops.uva_sparse_gather(host, device, miss_src, miss_dst, counts)


def pair_bytes(pairs: Sequence[Pair]) -> int:
    """Bytes of one token over all pairs."""
    return sum(host.shape[-1] * host.element_size() for host, _ in pairs)


def _swap(tables: Tables, step: Step, pairs: list[Pair], out: Tensor, skip_io: bool) -> Resolved:
    activation = current()
    if step.tokens.shape[1] > tables.lru_slots.shape[1]:
        raise MountError(
            f"sglang: HiSparse: device_buffer_size: expected at least the {step.tokens.shape[1]} selected tokens, got "
            f"{tables.lru_slots.shape[1]}"
        )
    resolved = resolve(tables, step, activation.ops)
    if activation.settings.checks == "values":
        _refuse_lost_tokens(resolved)
    out[:, : step.tokens.shape[1]] = resolved.locs
    COUNTS.add_lookups(resolved.hit_counts, resolved.miss_counts)
    if skip_io:
        return resolved
    COUNTS.add_copies(resolved.miss_counts, pair_bytes(pairs))

    def transfer() -> None:
        copy_misses(pairs, resolved.miss_src, resolved.miss_dst, resolved.miss_counts)

    if _deferred is None:
        transfer()
    else:
        keep = (resolved.miss_src, resolved.miss_dst, resolved.miss_counts)
        _deferred.missed = resolved.missed
        _deferred.event = _deferred.lane.run(transfer, *keep)
    return resolved


def _record(resolved: Resolved, miss_src: Tensor | None, miss_dst: Tensor | None, miss_count: Tensor | None) -> None:
    """Write the plan down for `copy_cache_planned_mla`. Padded requests get the count 0."""
    if miss_src is None:
        return
    assert miss_dst is not None
    assert miss_count is not None
    width = resolved.miss_src.shape[1]
    miss_src[:, :width] = resolved.miss_src
    miss_dst[:, :width] = resolved.miss_dst
    miss_count.copy_(resolved.miss_counts)


def _token_pairs(host_cache: Tensor, device_buffer: Tensor, item_size_bytes: int) -> list[Pair]:
    return [(_items(host_cache, item_size_bytes), _items(device_buffer, item_size_bytes))]


def _dsv4_pairs(host_cache: Tensor, device_buffer: Tensor) -> list[Pair]:
    return list(zip(dsv4_rows(host_cache), dsv4_rows(device_buffer), strict=True))


def _items(pool: Tensor, item_size_bytes: int) -> Tensor:
    rows = token_rows(pool)
    if rows.shape[1] != item_size_bytes:
        raise MountError(f"sglang: HiSparse: a pool's row: expected {item_size_bytes} bytes, got {rows.shape[1]}")
    return rows


def _refuse_lost_tokens(resolved: Resolved) -> None:
    columns = torch.arange(resolved.miss_src.shape[1], device=resolved.miss_src.device)
    lost = (columns < resolved.miss_counts[:, None]) & (resolved.miss_src < 0)
    if bool(lost.any()):
        raise MountError(
            f"sglang: HiSparse: {int(lost.sum())} wanted tokens are neither in the hot buffer nor in host memory"
        )
