"""SGLang's own HiSparse on our platform: its coordinator and tables, our ops under them.

What SGLang compiles for CUDA is replaced (swap-in, replay, host transfers, host memory), its checks of the pool count
the hot buffers, and its refusal of out-of-tree platforms is lifted for the one pool that this serves, the KV pool of
DSA models. Everything else of HiSparse, its flags and its restrictions included, stays SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baige_device.activation import current
from baige_device.engines.sglang import hisparse_host, hisparse_room, hisparse_spec, hisparse_swap
from baige_device.engines.sglang.compat import cpu_group
from baige_device.engines.sglang.hisparse_args import ranks_per_node
from baige_device.engines.sglang.hisparse_counts import COUNTS
from baige_device.engines.sglang.hisparse_plan import announce_plan
from baige_device.engines.sglang.ledger import (
    HISPARSE_BACKUP,
    HISPARSE_CAPACITY,
    HISPARSE_COORDINATOR,
    HISPARSE_DESTROY,
    HISPARSE_LOAD,
    HISPARSE_PINNING,
    HISPARSE_POOL,
    HISPARSE_READY,
    HISPARSE_REFUSAL,
    HISPARSE_SWAPS,
    LEDGER,
    hook,
)
from baige_device.optimizations.hisparse.setup import check_host_pool
from baige_device.settings import load_settings

__all__ = ["SERVED_POOL", "install", "report"]

SERVED_POOL = "the HiSparse DSA KV pool"
"""SGLang's name of the path that we serve."""


def install(*, cpu: bool) -> None:
    """Mount into this process; nothing changes until a server is started with HiSparse. `cpu`: no memory is pinned."""
    for target in HISPARSE_SWAPS:
        name = target.partition(":")[2]
        hook(target, getattr(hisparse_swap, name, None) or getattr(hisparse_spec, name), "replace")
    hook(HISPARSE_BACKUP, hisparse_host.backup_all_layers, "around")
    hook(HISPARSE_LOAD, hisparse_host.load_layer, "around")
    hook(HISPARSE_DESTROY, hisparse_host.destroy, "around")
    hook(HISPARSE_CAPACITY, hisparse_room.check_decode_capacity, "around")
    hook(HISPARSE_READY, hisparse_room.collect_ready, "around")
    hook(HISPARSE_COORDINATOR, _make_coordinator, "around")
    LEDGER.patch(HISPARSE_REFUSAL, _refuse_others)
    LEDGER.patch(HISPARSE_POOL, _pool_class)
    if cpu:
        LEDGER.patch(HISPARSE_PINNING, _UnpinnedTorch)


def report(runner: Any) -> dict[str, Any] | None:
    """What HiSparse holds and did on this rank, for `/server_info`; None without HiSparse. Waits for the device."""
    coordinator = runner.hisparse_coordinator
    if coordinator is None:
        return None
    stats = coordinator.get_token_stats()
    logical = coordinator.token_to_kv_pool_allocator.logical_attn_allocator
    return {
        **COUNTS.read(),
        "logical_tokens": logical.size - logical.available_size(),
        "device_tokens": stats.device_tokens,
        "host_tokens": stats.host_tokens,
        "host_capacity_tokens": coordinator.mem_pool_host.size,
        "hot_tokens": coordinator.device_buffer_size,
    }


def _make_coordinator(original: Callable[[Any], None], runner: Any) -> None:
    """SGLang makes its coordinator, and with it the host pool, in memory of ours."""
    if not runner.enable_hisparse:
        original(runner)
        return
    import torch

    budget = _host_budget(runner.server_args)
    if cpu_group().size() > 1:
        # What was checked is the node's total: no rank may allocate before all have checked it.
        torch.distributed.barrier(cpu_group())
    with hisparse_host.host_memory(torch.device(runner.device).type, budget):
        original(runner)
    hisparse_room.watch(runner.hisparse_coordinator)
    announce_plan(runner)


def _host_budget(server_args: Any) -> int:
    """This rank's bytes of `hisparse.host_gib_per_node`, checked for the whole node; 0 without that setting."""
    settings = load_settings().hisparse
    offer = current().resolutions["host_alloc"].chosen
    if not settings.enabled or offer is None:
        return 0
    return check_host_pool(settings, ranks_per_node(server_args), offer.offer.facts)


def _refuse_others(original: Callable[..., None]) -> Callable[..., None]:
    def refuse(platform: Any, *, subsystem: str) -> None:
        if subsystem != SERVED_POOL:
            original(platform, subsystem=subsystem)

    return refuse


def _pool_class(original: type) -> type:
    from baige_device.engines.sglang.pool import BaigeHiSparsePool

    return BaigeHiSparsePool


class _UnpinnedTorch:
    """Torch as the coordinator's module sees it where there is no accelerator: `tensor` pins nothing."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self._original.tensor(*args, **kwargs)
