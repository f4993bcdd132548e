"""What differs between the vLLM versions of the window, each decided by looking at the host, never by its version."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from baige_device.engines.versions import HostWindow

__all__ = [
    "CUDA_WINDOW",
    "HISPARSE_WINDOW",
    "WINDOW",
    "attention_name",
    "engine_name",
    "has_kernel_registry",
    "has_named_backends",
    "host_rank",
    "index_cache_spec",
    "init_runner",
    "router_ops_take_padding",
    "slot_mapping_takes_kernel_blocks",
]

WINDOW = HostWindow("vllm", ">=0.30,<0.34")
CUDA_WINDOW = ">=0.33,<0.34"
"""Sparse MLA and HiSparse on NVIDIA were reshaped with each release before."""

HISPARSE_WINDOW = ">=0.33,<0.34"
"""The runner's seams that our HiSparse coordinator uses were read and run on these releases only."""


def engine_name() -> str:
    """`vllm VERSION`, for the activation record."""
    return f"vllm {WINDOW.installed()}"


@functools.lru_cache(maxsize=1)
def has_named_backends() -> bool:
    """From 0.32 on an attention backend from outside has a name of its own; before that it is `CUSTOM`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return hasattr(AttentionBackendEnum, "register")


def attention_name(name: str) -> str:
    """The name under which the host knows one of our attention backends."""
    return name if has_named_backends() else "CUSTOM"


@functools.lru_cache(maxsize=1)
def has_kernel_registry() -> bool:
    """From 0.31 on Triton kernels are replaced through a registry; before that the CPU runner calls a `_C` op."""
    from vllm.platforms.interface import Platform

    return hasattr(Platform, "register_triton_kernel_overrides")


def slot_mapping_takes_kernel_blocks(kernel: Any) -> bool:
    """In 0.31 the slot-mapping kernel gets the block size as an argument of its own, behind the stride."""
    return "BLOCKS_PER_KV_BLOCK" in inspect.signature(getattr(kernel, "fn", kernel)).parameters


def host_rank(parallel_config: Any, world: Any) -> int:
    """Rank of this process among all workers of a server.

    Data-parallel replicas of a MoE model share one world group; those of a dense model have a world of ranks each.
    """
    shared = parallel_config.data_parallel_size > 1
    replica = 0 if shared else int(getattr(parallel_config, "data_parallel_index", 0) or 0)
    return replica * int(world.world_size) + int(world.rank_in_group)


def init_runner(worker: Any) -> None:
    """Create the workspace manager and the model runner of a worker."""
    if hasattr(worker, "_init_workspace_and_model_runner"):
        worker._init_workspace_and_model_runner()
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(worker.device, 1)
    worker.model_runner = worker._make_model_runner()


def index_cache_spec(block_size: int, head_size: int, dtype: Any) -> Any:
    """The KV cache spec of DSA index keys; the fields that mark it as such came one by one."""
    from vllm.v1 import kv_cache_interface as host

    known = {field.name for field in dataclasses.fields(host.MLAAttentionSpec)}
    extra: dict[str, Any] = {}
    if "max_tp_shards" in known:
        extra["max_tp_shards"] = 1
    if "cache_role" in known:
        extra["cache_role"] = host.SparseCacheRole.INDEXER
    return host.MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=head_size, dtype=dtype, **extra)


def router_ops_take_padding() -> bool:
    """Whether the router ops that are called by name get a mask of padded tokens (from 0.30 on)."""
    from vllm import _custom_ops

    return "is_padding" in inspect.signature(_custom_ops.topk_softmax).parameters
