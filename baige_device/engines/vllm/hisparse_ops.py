"""vLLM's four HiSparse ops over the op table, for devices without vLLM's compiled ones.

They are the data plane below vLLM's own HiSparse runtime and coordinator (`vllm.v1.hisparse`). A state is a request's
hot buffer; keys are host rows; a page that still has its copy on the device is read where it is. CUDA graphs may hold
them: no shape depends on a value and nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baige_device.activation import current
from baige_device.engines.vllm.named_ops import define_op
from baige_device.errors import ContractError

__all__ = ["define_hisparse_ops", "gather_compact", "gather_plan", "invalidate_written_slots", "resolve_residency"]

_NAMESPACE = "_C_cache_ops"
_SCHEMAS = (
    "hisparse_resolve_residency(Tensor host_cache, Tensor! hot_cache, Tensor hot_block_table, Tensor global_indices, "
    "Tensor! hot_indices, Tensor! device_global_indices, Tensor! lru_slots, Tensor? request_state_indices, "
    "int region_stride, int max_union_rows, Tensor(a!)? miss_mask=None, Tensor(b!)? stats=None, "
    "Tensor(c!)? attention_indices=None, int attention_block_stride=0, Tensor? request_ids=None, "
    "Tensor? source_block_table=None, int source_block_size=0, Tensor(d!)? resolved_global_indices=None, "
    "Tensor(e!)? valid_counts=None, Tensor(f!)? swap_host_physical_rows=None, "
    "Tensor(g!)? swap_device_physical_rows=None, Tensor(h!)? swap_counts=None, Tensor? resident_block_table=None, "
    "int resident_block_size=0, int resident_null_block=0) -> ()",
    "hisparse_gather_compact(Tensor host_cache, Tensor! hot_cache, Tensor miss_global_indices, "
    "Tensor miss_hot_indices, Tensor miss_counts) -> ()",
    "hisparse_gather_plan(Tensor host_cache, Tensor! hot_cache, Tensor global_indices, Tensor hot_indices, "
    "Tensor miss_mask, Tensor? request_state_indices, Tensor(a!)? attention_indices=None, "
    "int attention_block_stride=0) -> ()",
    "hisparse_invalidate_written_slots(Tensor! device_global_indices, Tensor request_state_indices, "
    "Tensor req_id_per_token, Tensor written_slots) -> ()",
)


def define_hisparse_ops() -> None:
    """Define those of the four ops that no compiled library has defined. Idempotent."""
    bodies: tuple[Callable[..., None], ...] = (
        resolve_residency,
        gather_compact,
        gather_plan,
        invalidate_written_slots,
    )
    for schema, body in zip(_SCHEMAS, bodies, strict=True):
        define_op(_NAMESPACE, schema, body)


def resolve_residency(
    host_cache: Tensor,
    hot_cache: Tensor,
    hot_block_table: Tensor,
    global_indices: Tensor,
    hot_indices: Tensor,
    device_global_indices: Tensor,
    lru_slots: Tensor,
    request_state_indices: Tensor | None,
    region_stride: int,
    max_union_rows: int,
    miss_mask: Tensor | None = None,
    stats: Tensor | None = None,
    attention_indices: Tensor | None = None,
    attention_block_stride: int = 0,
    request_ids: Tensor | None = None,
    source_block_table: Tensor | None = None,
    source_block_size: int = 0,
    resolved_global_indices: Tensor | None = None,
    valid_counts: Tensor | None = None,
    swap_host_physical_rows: Tensor | None = None,
    swap_device_physical_rows: Tensor | None = None,
    swap_counts: Tensor | None = None,
    resident_block_table: Tensor | None = None,
    resident_block_size: int = 0,
    resident_null_block: int = 0,
) -> None:
    """Where each wanted token is, and which host rows have to be copied first.

    Args:
        global_indices: int32 `[T, K]` positions within a request (with `source_block_table`) or host rows; -1 padding.
        hot_cache: `[P, N, W]`. hot_block_table, source_block_table: by request; resident_block_table: by state.
        device_global_indices, lru_slots: the states `[R, >= region_stride]`, updated.
        hot_indices, attention_indices: written `[T, K]`: slot, and row of the pool with `attention_block_stride` rows
            a page. swap_*: the compact plan for `gather_compact`, all three together.
    Raises:
        ContractError: the per-position `miss_mask`, which no caller asks for.
    """
    if miss_mask is not None:
        raise ContractError("hisparse_resolve_residency", "miss_mask", "None (use the compact plan)", "a tensor")
    page_rows = hot_cache.shape[1]
    stride = attention_block_stride or page_rows
    requests = _requests(global_indices, request_ids)
    states = _states(requests, request_state_indices)
    keys, rows = _keys(
        global_indices,
        requests,
        states,
        (source_block_table, source_block_size),
        (resident_block_table, resident_block_size, resident_null_block),
        stride,
    )
    plan = current().ops.hot_cache_resolve(
        keys, states, device_global_indices[:, :region_stride], lru_slots[:, :region_stride]
    )
    table = hot_block_table[requests.clamp_min(0)]
    rows = torch.where(plan.slots >= 0, _paged_rows(table, plan.slots, page_rows, stride), rows)
    hot_indices.copy_(plan.slots)
    if attention_indices is not None:
        attention_indices.copy_(rows)
    if resolved_global_indices is not None:
        resolved_global_indices.copy_(keys)
    if valid_counts is not None:
        valid_counts.copy_((rows >= 0).sum(1))
    if swap_host_physical_rows is not None and swap_device_physical_rows is not None and swap_counts is not None:
        swap_host_physical_rows.copy_(plan.miss_keys)
        misses = _paged_rows(table, plan.miss_slots, page_rows, page_rows)
        swap_device_physical_rows.copy_(torch.where(plan.miss_slots >= 0, misses, -1))
        swap_counts.copy_(plan.miss_counts)
    if stats is not None:
        missed = plan.miss_counts.sum()
        stats.view(torch.int64).add_(torch.stack(((plan.slots >= 0).sum() - missed, missed)))


def gather_compact(
    host_cache: Tensor, hot_cache: Tensor, miss_global_indices: Tensor, miss_hot_indices: Tensor, miss_counts: Tensor
) -> None:
    """Copy host rows `[S, W]` to the hot pool `[P, N, W]`, by request `[T, K]`, `miss_counts[t]` of each."""
    current().ops.uva_sparse_gather(host_cache, hot_cache, miss_global_indices, miss_hot_indices, miss_counts)


def gather_plan(
    host_cache: Tensor,
    hot_cache: Tensor,
    global_indices: Tensor,
    hot_indices: Tensor,
    miss_mask: Tensor,
    request_state_indices: Tensor | None,
    attention_indices: Tensor | None = None,
    attention_block_stride: int = 0,
) -> None:
    """Copy the host rows whose mask is set: `hot[hot_indices] = host[global_indices]`, all `[T, K]`.

    Raises:
        ContractError: the forms with states or attention indices, which no caller asks for.
    """
    if request_state_indices is not None or attention_indices is not None:
        raise ContractError(
            "hisparse_gather_plan", "request_state_indices, attention_indices", "None (physical rows)", "a tensor"
        )
    wanted = miss_mask != 0
    targets = torch.where(wanted, hot_indices, -1)
    current().ops.uva_sparse_gather(host_cache, hot_cache, torch.where(wanted, global_indices, -1), targets)


def invalidate_written_slots(
    device_global_indices: Tensor, request_state_indices: Tensor, req_id_per_token: Tensor, written_slots: Tensor
) -> None:
    """Forget the hot copies `[R, H]` of host rows that were written: token t wrote `written_slots[t]`."""
    requests = req_id_per_token.long()
    states = _states(requests, request_state_indices)
    written = torch.where(states >= 0, written_slots, -1)
    rows = states.clamp_min(0).long()
    same = (device_global_indices[rows] == written.unsqueeze(1)) & (written >= 0).unsqueeze(1)
    # A key lies in one slot at most. Tokens of one state may follow each other, so what is kept must not be rewritten.
    found, slot = same.max(1)
    flat = rows * device_global_indices.shape[1] + slot
    keep = torch.iinfo(device_global_indices.dtype).max
    values = torch.where(found, -1, keep).to(device_global_indices.dtype)
    device_global_indices.view(-1).scatter_reduce_(0, flat, values, "amin")


def _requests(indices: Tensor, request_ids: Tensor | None) -> Tensor:
    """int64 `[T]`, -1 padding."""
    if request_ids is None:
        return torch.arange(indices.shape[0], device=indices.device)
    return request_ids.long()


def _states(requests: Tensor, request_state_indices: Tensor | None) -> Tensor:
    """int32 `[T]`, -1 padding."""
    if request_state_indices is None:
        return requests.int()
    return torch.where(requests >= 0, request_state_indices[requests.clamp_min(0)], -1).int()


def _keys(
    positions: Tensor,
    requests: Tensor,
    states: Tensor,
    source: tuple[Tensor | None, int],
    resident: tuple[Tensor | None, int, int],
    stride: int,
) -> tuple[Tensor, Tensor]:
    """int32 `[T, K]` each: host rows to look up (-1 for padding and residents), and rows of resident pages (-1)."""
    wanted = (positions >= 0) & (states >= 0).unsqueeze(1)
    where = positions.clamp_min(0).long()
    table, page_rows, null = resident
    rows = torch.full_like(positions, -1)
    if table is not None:
        pages = torch.gather(table[states.clamp_min(0).long()], 1, where // page_rows)
        here = wanted & (pages != null)
        rows = torch.where(here, pages * stride + where % page_rows, -1).int()
        wanted = wanted & ~here
    table, page_rows = source
    if table is None:
        keys = where
    else:
        keys = torch.gather(table[requests.clamp_min(0)], 1, where // page_rows) * page_rows + where % page_rows
    return torch.where(wanted, keys, -1).int(), rows


def _paged_rows(table: Tensor, slots: Tensor, page_rows: int, stride: int) -> Tensor:
    """Slots `[T, K]` of buffers whose pages are `table` `[T, M]` -> rows with `stride` rows a page, int32."""
    where = slots.clamp_min(0).long()
    return (torch.gather(table, 1, where // page_rows) * stride + where % page_rows).int()
