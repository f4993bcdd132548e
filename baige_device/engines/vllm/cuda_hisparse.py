"""HiSparse's swap on NVIDIA: vLLM's runtime and coordinator with our lookup, translation and copy below them.

The host resolves a layer with a 25-argument op between three element-wise kernels on a side stream, and waits for it at
once. Here a layer that shares its index with no other runs on the compute stream: two translations, the lookup and the
copy, with no stream or event in between. Layers that follow a leader are copied on the host's copy stream while earlier
layers compute, as the host does it, and so are the misses when hits are attended meanwhile (`hisparse.overlap`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.backends.cuda.swap_plan import SwapParams, address, launch_to_keys, launch_to_rows
from baige_device.engines.vllm.cuda_replay import Repeated, may_repeat
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from baige_device.registry.table import OpTable

__all__ = ["COPY_SMS", "SWAP_IN", "SplitSwap", "mount_swap", "replaced", "split_swap"]

_LAUNCHES = 4
"""Keys, lookup, rows, copy."""
COPY_SMS = 5
"""Multiprocessors of a copy beside attention, which gives them no work: enough for the link, few enough to spare."""
SWAP_IN = "vllm.v1.hisparse.runtime:HiSparseRuntime.swap_in"


def mount_swap(features: Any) -> None:
    """Replace the swap of the host's runtime."""
    LEDGER.patch(SWAP_IN, functools.partial(replaced, features.ops))


def replaced(ops: OpTable, original: Any) -> Any:
    """`HiSparseRuntime.swap_in` over these ops; calls with buffers of the caller's own go to `original`."""

    def swap_in(self: Any, *, attention_indices_out: Any = None, valid_counts_out: Any = None, **arguments: Any) -> Any:
        if attention_indices_out is not None or valid_counts_out is not None:
            return original(
                self, attention_indices_out=attention_indices_out, valid_counts_out=valid_counts_out, **arguments
            )
        return _swap_in(self, ops, **arguments)

    return swap_in


@dataclass
class _Step:
    """Views of the buffers of an index group for one range of its rows."""

    params: SwapParams
    keys: Tensor
    state_rows: Tensor
    plan: ResolvePlan
    rows: Tensor
    miss_rows: Tensor
    valid_counts: Tensor
    hit_rows: Tensor
    late_rows: Tensor
    repeated: Repeated


@dataclass(frozen=True)
class SplitSwap:
    """Where the hits are, and where the misses will be."""

    hit_rows: Tensor
    """int32 `[T, K]`, -1 for misses and padding."""
    late_rows: Tensor
    """int32 `[T, K]`, compact."""
    late_counts: Tensor
    """int32 `[T]`."""
    ready: Any

    def join(self) -> None:
        """Make the current stream wait for the copy."""
        torch.cuda.current_stream().wait_event(self.ready)


class _Scratch:
    """Buffers that are dead when the layer's kernels on the compute stream are through: one set for all groups."""

    def __init__(self, rows: int, wanted: int, device: torch.device) -> None:
        def lists() -> Tensor:
            return torch.empty((rows, wanted), dtype=torch.int32, device=device)

        self.keys, self.miss_slots, self.hit_rows, self.late_rows = lists(), lists(), lists(), lists()
        self.state_rows = torch.empty(rows, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=4)
def _scratch(rows: int, wanted: int, device: torch.device) -> _Scratch:
    return _Scratch(rows, wanted, device)


class _Plane:
    """What an index group needs beside the host's own state; kept on the host's group object."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._steps: dict[tuple[int, int], _Step] = {}
        self.late_event = torch.cuda.Event()
        self.early_event = torch.cuda.Event()

    def step(self, start: int, stop: int) -> _Step:
        found = self._steps.get((start, stop))
        if found is None:
            found = self._steps[start, stop] = self._make(slice(start, stop))
        return found

    def _make(self, rows: slice) -> _Step:
        shared = self.group.shared_topk
        total, wanted = shared.physical_topk_indices.shape
        scratch = _scratch(total, wanted, shared.physical_topk_indices.device)
        plan = ResolvePlan(
            slots=shared.device_topk_rows[rows],
            miss_keys=shared.swap_host_physical_rows[rows],
            miss_slots=scratch.miss_slots[rows],
            miss_counts=shared.swap_counts[rows],
        )
        step = _Step(
            SwapParams(),
            scratch.keys[rows],
            scratch.state_rows[rows],
            plan,
            shared.physical_topk_indices[rows],
            shared.swap_device_physical_rows[rows],
            shared.valid_topk_counts[rows],
            scratch.hit_rows[rows],
            scratch.late_rows[rows],
            Repeated(_LAUNCHES),
        )
        params = step.params
        params.keys, params.state_rows, params.rows = address(step.keys), address(step.state_rows), address(step.rows)
        params.slots, params.miss_slots = address(plan.slots), address(plan.miss_slots)
        params.miss_counts, params.miss_rows = address(plan.miss_counts), address(step.miss_rows)
        params.valid_counts, params.stats = address(step.valid_counts), address(self.group.swap_stats)
        params.hit_rows, params.late_rows = address(step.hit_rows), address(step.late_rows)
        params.wanted = wanted
        return step


def _plane(group: Any) -> _Plane:
    plane: _Plane | None = getattr(group, "_baige_plane", None)
    if plane is None:
        plane = group._baige_plane = _Plane(group)
    return plane


def _swap_in(
    self: Any,
    ops: OpTable,
    *,
    resident: Any,
    req_id_per_token: Tensor,
    block_table: Tensor,
    logical_topk_indices: Tensor,
    block_size: int,
    num_valid_rows: Tensor,
    return_valid_counts: bool = False,
) -> Any:
    """As the host's: rows of the hot pool `[T, K]` (and how many are valid), with the misses in place."""
    rows = self._step_rows(logical_topk_indices.shape[0])
    group = self.index_group
    step = _plane(group).step(rows.start, rows.stop)
    if self.is_group_leader:
        _lead(self, ops, step, resident, req_id_per_token, block_table, logical_topk_indices, num_valid_rows)
        if resident.decode_batch and group.followers:
            _stage_followers(group, ops, step)
    elif self._swap_staged:
        self.wait_for_staged_swap()
    else:
        _gather(self, ops, step)
    if return_valid_counts:
        return step.rows, step.valid_counts
    return step.rows


def _lead(
    runtime: Any,
    ops: OpTable,
    step: _Step,
    resident: Any,
    requests: Tensor,
    block_table: Tensor,
    topk: Tensor,
    valid_rows: Tensor,
) -> None:
    """The leader's lookup and copy."""

    def run() -> None:
        _resolve(runtime, ops, step, resident, requests, block_table, topk, valid_rows, False)
        _gather(runtime, ops, step)

    if not _repeats(ops, step.params.wanted, runtime.region_stride):
        run()
        return
    pages, hot = resident.block_table, runtime.hot
    changing = (topk, requests, block_table, valid_rows, runtime.request_state_indices, runtime.hot_block_table)
    fixed = (runtime.host_cache, hot.cache, runtime.index_group.device_global_indices, runtime.index_group.lru_slots)
    strides = (topk.stride(0), block_table.stride(0), 0 if pages is None else pages.stride(0))
    key = (address(pages), *strides, *[tensor.data_ptr() for tensor in changing + fixed])
    step.repeated(key, topk.device.index, run)


@functools.lru_cache(maxsize=16)
def _repeats(ops: OpTable, wanted: int, slots: int) -> bool:
    return may_repeat(ops, "hot_cache_resolve", "uva_sparse_gather", entries=max(wanted, slots))


def split_swap(cache: Any, topk: Tensor, attn_metadata: Any) -> SplitSwap:
    """Start the swap of a decode batch for one layer's `cache` handle, and say which rows are there already.

    The copy runs on the group's copy stream: the leader's at once, its followers' behind it.
    """
    from baige_device.engines.vllm.cuda_features import cuda_features

    runtime, group = cache.runtime, cache.runtime.index_group
    ops = cuda_features().ops
    rows = runtime._step_rows(topk.shape[0])
    plane = _plane(group)
    step = plane.step(rows.start, rows.stop)
    if runtime.is_group_leader:
        requests = attn_metadata.req_id_per_token[: topk.shape[0]]
        valid_rows = attn_metadata.query_start_loc[-1:]
        _resolve(runtime, ops, step, cache, requests, cache.source_block_table, topk, valid_rows, True)
        plane.early_event.record()
        with torch.cuda.stream(_copy_stream(group)):
            torch.cuda.current_stream().wait_event(plane.early_event)
            _gather(runtime, ops, step, COPY_SMS)
            plane.late_event.record()
            for follower in group.followers:
                _gather_staged(follower, group, ops, step)
        return SplitSwap(step.hit_rows, step.late_rows, step.plan.miss_counts, plane.late_event)
    runtime._swap_staged = False
    return SplitSwap(step.hit_rows, step.late_rows, step.plan.miss_counts, runtime._layer_ready_event)


def _resolve(
    runtime: Any,
    ops: OpTable,
    step: _Step,
    resident: Any,
    requests: Tensor,
    block_table: Tensor,
    topk: Tensor,
    valid_rows: Tensor,
    split: bool,
) -> None:
    group, hot, params = runtime.index_group, runtime.hot, step.params
    pages = resident.block_table
    params.positions, params.positions_stride = address(topk), topk.stride(0)
    params.requests, params.valid_rows = address(requests), address(valid_rows)
    params.states = address(runtime.request_state_indices)
    params.source_table, params.source_stride = address(block_table), block_table.stride(0)
    params.hot_table, params.hot_stride = address(runtime.hot_block_table), runtime.hot_block_table.stride(0)
    params.resident_table = address(pages)
    if pages is not None:
        params.resident_stride, params.resident_rows = pages.stride(0), resident.view.block_size
    params.page_rows, params.page_stride = hot.block_size, hot.attention_block_stride
    params.hot_slots = runtime.region_stride
    num_rows, device = topk.shape[0], topk.device.index
    launch_to_keys(params, num_rows, device)
    ops.hot_cache_resolve(step.keys, step.state_rows, group.device_global_indices, group.lru_slots, out=step.plan)
    launch_to_rows(params, num_rows, device, split=split)


def _gather(runtime: Any, ops: OpTable, step: _Step, max_sms: int = 0) -> None:
    plan = step.plan
    host, hot = runtime.host_cache, runtime.hot.cache
    ops.uva_sparse_gather(host, hot, plan.miss_keys, step.miss_rows, plan.miss_counts, max_sms=max_sms)


def _stage_followers(group: Any, ops: OpTable, step: _Step) -> None:
    stream = _copy_stream(group)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for follower in group.followers:
            _gather_staged(follower, group, ops, step)


def _gather_staged(follower: Any, group: Any, ops: OpTable, step: _Step) -> None:
    _gather(follower, ops, step)
    if follower._layer_ready_event is None:
        follower._layer_ready_event = torch.cuda.Event()
    follower._layer_ready_event.record(torch.cuda.current_stream())
    follower._swap_staged = True


def _copy_stream(group: Any) -> Any:
    """The group's copy stream as a CUDA stream."""
    stream = group.copy_stream
    if isinstance(stream, torch.cuda.Stream):
        return stream
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
