"""What of vLLM on NVIDIA runs through our ops in this process: decided once, when the first sparse layer is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from baige_device.engines.vllm.cuda_host_pool import serves_pool
from baige_device.engines.vllm.cuda_options import given_by_setting
from baige_device.engines.vllm.hisparse_options import CONNECTOR
from baige_device.engines.vllm.hisparse_sizes import local_ranks
from baige_device.engines.vllm.options import engine_settings
from baige_device.engines.vllm.process import activate_process
from baige_device.errors import MountError
from baige_device.optimizations.hisparse.setup import check_host_pool
from baige_device.registry.offers import Need
from baige_device.registry.table import OpTable
from baige_device.settings import Settings

__all__ = ["CudaFeatures", "check_hisparse_settings", "cuda_features", "cuda_needs"]

logger = logging.getLogger("baige_device")

_SWAP_OPS = ("hot_cache_resolve", "uva_sparse_gather")


@dataclass(frozen=True)
class CudaFeatures:
    """The outcome, and the ops."""

    ops: OpTable
    attention: bool
    """`sparse_attention` in place of the host's calls of FlashMLA."""
    swap: bool
    """HiSparse's lookup and copy through `hot_cache_resolve` and `uva_sparse_gather`."""
    mirror: bool
    """HiSparse's copy of decoded rows to the host through `uva_sparse_scatter`."""
    pool: bool
    """HiSparse's host pool from `host_alloc`. The host's own swap reads registered memory only, so not without ours."""
    index: bool
    """`index_topk` in place of the host's indexer: only when its tier is named, since the host's kernel is faster."""
    overlap: bool
    pid: int


_decided: CudaFeatures | None = None


def cuda_features() -> CudaFeatures:
    """Activate and apply the patches of what is on; later calls return the same.

    Raises:
        OpUnsupported: the model needs what no kernel serves. MountError: overlap without the ops that it needs.
    """
    global _decided
    if _decided is None or _decided.pid != os.getpid():
        from vllm.config import get_current_vllm_config

        _decided = _decide(get_current_vllm_config())
    return _decided


def cuda_needs(vllm_config: Any, settings: Settings) -> list[Need]:
    """What the mount asks of the ops that are not switched off, in the vocabulary of `baige_device.testing.needs`."""
    who = f"model {vllm_config.model_config.model}"
    return [
        Need(op, who, {"dtype": "bfloat16"} | params)
        for op, params in _params(vllm_config, settings)
        if settings.ops.get(op) != "off"
    ]


def _params(vllm_config: Any, settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    model = vllm_config.model_config
    text, heads = model.hf_text_config, model.get_num_attention_heads(vllm_config.parallel_config)
    fp8 = str(vllm_config.cache_config.cache_dtype) in ("fp8", "fp8_ds_mla")
    width = text.kv_lora_rank + text.qk_rope_head_dim
    shape = {"num_q_heads": heads, "num_kv_heads": 1, "head_size": width, "v_head_size": text.kv_lora_rank}
    lists = {"mla": True, "topk": text.index_topk, "kv_format": "fp8_ds_mla" if fp8 else "plain"}
    yield "sparse_attention", shape | lists
    if settings.ops.get("index_topk", "off") != "off":
        index = {"num_q_heads": text.index_n_heads, "head_size": text.index_head_dim, "topk": text.index_topk}
        yield "index_topk", index | {"dtype": "float8_e4m3fn", "page_size": vllm_config.cache_config.block_size}
    if vllm_config.attention_config.hisparse_config is None:
        return
    row = {"row_bytes": 656 if fp8 else 2 * width, "pool": "paged", "index_dtype": "int32", "dtype": "uint8"}
    yield "host_alloc", {}
    yield "hot_cache_resolve", {"topk": text.index_topk, "index_dtype": "int32", "shared_states": True}
    yield "uva_sparse_gather", row | {"by_request": True}
    yield "uva_sparse_scatter", row | {"by_request": False, "index_dtype": "int64"}
    if settings.hisparse.overlap:
        yield "merge_attention", {"num_q_heads": heads, "v_head_size": text.kv_lora_rank}


def check_hisparse_settings(settings: Settings, vllm_config: Any) -> bool:
    """Whether the host's own HiSparse is on, which our setting has switched on unless the host's options say more.

    Raises:
        MountError: ours ask for HiSparse and another connector of the host's options has its place.
    """
    hisparse = vllm_config.attention_config.hisparse_config is not None
    ours = settings.hisparse
    if ours.enabled and not hisparse:
        connector = vllm_config.kv_transfer_config and vllm_config.kv_transfer_config.kv_connector
        raise MountError(
            f"vllm: hisparse.host_gib_per_node = {ours.host_gib_per_node:g}: expected no --kv-transfer-config, or one "
            f"with {CONNECTOR}, got {connector}; give vLLM's own options for both, or leave "
            "hisparse.host_gib_per_node at 0"
        )
    idle = [f"hisparse.{name}" for name in ("host_gib_per_node", "hot_tokens") if getattr(ours, name)]
    if hisparse and idle and not given_by_setting(vllm_config):
        logger.warning(
            "vllm: %s: no effect, since vLLM's own HiSparse options are given: host_pool_gib and device_buffer_size",
            " and ".join(idle),
        )
    return hisparse


def _decide(vllm_config: Any) -> CudaFeatures:
    settings = engine_settings(vllm_config)
    hisparse = check_hisparse_settings(settings, vllm_config)
    if given_by_setting(vllm_config):
        # For all ranks of the node together, before any allocates; what is pinned is not known yet and not accounted.
        check_host_pool(settings.hisparse, local_ranks(vllm_config.parallel_config), {})
    needs = cuda_needs(vllm_config, settings)
    active = activate_process(vllm_config, needs, ("hisparse",) if hisparse else ())
    if active.record.backend != "cuda":
        raise MountError(f"vllm: on an NVIDIA device our backend must be cuda, got {active.record.backend}")
    wanted = {need.op for need in needs}
    swap = wanted.issuperset(_SWAP_OPS)
    overlap = swap and settings.hisparse.overlap
    if overlap and not wanted.issuperset(("sparse_attention", "merge_attention")):
        raise MountError("vllm: hisparse.overlap needs sparse_attention and merge_attention; BAIGE_OPS has one off")
    features = CudaFeatures(
        ops=active.ops,
        attention="sparse_attention" in wanted,
        swap=swap,
        mirror=swap and "uva_sparse_scatter" in wanted,
        pool=swap and "host_alloc" in wanted and serves_pool(vllm_config, active.resolutions["host_alloc"].chosen),
        index="index_topk" in wanted,
        overlap=overlap,
        pid=os.getpid(),
    )
    for wanted_here, apply in _patches():
        if wanted_here(features):
            apply(features)
    return features


def _patches() -> Iterator[tuple[Callable[[CudaFeatures], bool], Callable[[CudaFeatures], None]]]:
    from baige_device.engines.vllm import cuda_hisparse, cuda_host_pool, cuda_indexer, cuda_mirror

    yield lambda features: features.swap, cuda_hisparse.mount_swap
    yield lambda features: features.mirror, cuda_mirror.mount_mirror
    yield lambda features: features.pool, cuda_host_pool.mount_host_pool
    yield lambda features: features.index, cuda_indexer.mount_index
