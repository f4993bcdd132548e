"""Room for the hot buffers: SGLang's HiSparse grows them without asking whether the device pool has rows left.

A request of less than a hot buffer gets rows as it grows, and the last growth takes a page more than SGLang's check of
the next step counts; the start of decode takes them without any check. Both end the scheduler when the pool is full.
Here the check counts them, so that requests are retracted, and a prompt waits in its place until there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from baige_device.errors import MountError

__all__ = ["check_decode_capacity", "collect_ready", "watch"]

_coordinators: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Allocator -> coordinator."""


def watch(coordinator: Any) -> None:
    """Let the checks of this coordinator's allocator count its hot buffers."""
    _coordinators[coordinator.token_to_kv_pool_allocator] = coordinator


def check_decode_capacity(
    original: Callable[..., bool], allocator: Any, *, num_tokens: int, requests: Any = None, **context: Any
) -> bool:
    """Whether the next decode step fits, the growth of the hot buffers included."""
    if not original(allocator, num_tokens=num_tokens, requests=requests, **context):
        return False
    coordinator = _coordinators.get(allocator)
    if coordinator is None or requests is None:
        return True
    growth = sum(_growth(coordinator, request.kv) for request in requests)
    free: int = allocator.hisparse_attn_allocator.available_size()
    return growth <= free


def collect_ready(original: Callable[[Any], list[Any]], coordinator: Any) -> list[Any]:
    """The requests whose prompt is in host memory and that get a hot buffer now; the others stay in the queue.

    Raises:
        MountError: the pool is full of prompts that wait, and no running request will ever give rows back.
    """
    pool = coordinator.token_to_kv_pool_allocator.hisparse_attn_allocator
    free, staged = pool.available_size(), coordinator.ack_staging_queue
    ready, waiting = [], []
    for act in staged:
        held = _pages(coordinator, act.req.kv.kv_allocated_len)
        need = _first_buffer(coordinator, act.req.kv.kv_allocated_len) - held
        if need <= free:
            free -= need
            ready.append(act)
        else:
            waiting.append(act)
    held_by_staged = sum(_pages(coordinator, act.req.kv.kv_allocated_len) for act in staged)
    if waiting and not ready and pool.size - pool.available_size() <= held_by_staged:
        raise MountError(
            f"sglang: HiSparse: {len(waiting)} prompts fill the device pool of {pool.size} tokens, and none of them "
            f"has room for a hot buffer of {coordinator.padded_buffer_size}; raise --max-total-tokens"
        )
    coordinator.ack_staging_queue = ready
    try:
        return original(coordinator)
    finally:
        coordinator.ack_staging_queue += waiting


def _growth(coordinator: Any, kv: Any) -> int:
    """Rows that the hot buffer of a request grows by when it takes one more token."""
    tokens, held = kv.kv_committed_len + 1, int(coordinator.req_device_buffer_size[kv.req_pool_idx])
    if held == 0 or tokens <= held or tokens > coordinator.device_buffer_size:
        return 0
    return _first_buffer(coordinator, tokens) - held


def _first_buffer(coordinator: Any, tokens: int) -> int:
    """Rows of the hot buffer of a request of so many tokens."""
    rows: int = min(_pages(coordinator, tokens), coordinator.device_buffer_size)
    if coordinator.spec_swap.enabled or rows == coordinator.device_buffer_size:
        return int(coordinator.padded_buffer_size)
    return rows


def _pages(coordinator: Any, tokens: int) -> int:
    """Tokens in whole pages."""
    page = int(coordinator.page_size)
    return -(-tokens // page) * page
