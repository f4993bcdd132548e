"""`hisparse.host_gib_per_node` on NVIDIA: it becomes vLLM's own HiSparse options when vLLM makes its configuration.

vLLM derives a KV connector from its own offloading options at the same place. Options of vLLM's that are given win.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from baige_device.engines.vllm.hisparse_options import CONNECTOR, hot_tokens, refuse, split_sizes
from baige_device.engines.vllm.hisparse_sizes import local_ranks
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.options import engine_settings
from baige_device.engines.vllm.process import share_host_log
from baige_device.errors import MountError
from baige_device.optimizations.hisparse.setup import INT16_SLOTS
from baige_device.settings import HiSparseSettings

__all__ = ["given_by_setting", "mount_options"]

logger = logging.getLogger("baige_device")

_CONFIGURE = "vllm.config.vllm:VllmConfig.__post_init__"
_MARK = "given_by"
_US = "baige_device"


def mount_options() -> None:
    """Let our setting switch vLLM's HiSparse on."""
    LEDGER.patch(_CONFIGURE, configuring)


def configuring(original: Any) -> Any:
    """`VllmConfig.__post_init__` with the options that our setting stands for."""

    def configure(self: Any) -> None:
        give_options(self)
        try:
            original(self)
        except ValueError as error:
            if not given_by_setting(self):
                raise
            raise MountError(f"vllm: hisparse.host_gib_per_node is set, which switches HiSparse on: {error}") from error

    return configure


def given_by_setting(vllm_config: Any) -> bool:
    """Whether HiSparse is on by our setting and not by vLLM's options."""
    transfer = vllm_config.kv_transfer_config
    return (
        transfer is not None
        and transfer.kv_connector == CONNECTOR
        and transfer.kv_connector_extra_config.get(_MARK) == _US
    )


def give_options(vllm_config: Any) -> None:
    """Set vLLM's options if our setting asks for HiSparse and vLLM's have no KV connector.

    Raises:
        MountError: HiSparse cannot serve this start. SettingsError: an unknown option of ours or a bad value.
    """
    ours = engine_settings(vllm_config).hisparse
    if not ours.enabled or vllm_config.kv_transfer_config is not None:
        return
    refuse(_reasons(vllm_config))
    from vllm.config import KVTransferConfig
    from vllm.config.attention import HiSparseConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    share_host_log()
    parallel, pools = vllm_config.parallel_config, pools_on_node(vllm_config)
    size_gib = ours.host_gib_per_node / pools
    attention = vllm_config.attention_config
    if attention.hisparse_config is None:
        attention.hisparse_config = HiSparseConfig(device_buffer_size=_hot_tokens(vllm_config, ours))
    if attention.backend is None:
        attention.backend = AttentionBackendEnum.FLASHMLA_SPARSE
    elif attention.backend is not AttentionBackendEnum.FLASHMLA_SPARSE:
        logger.warning("vllm: HiSparse under %s runs by vLLM's own kernels", attention.backend.name)
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role="kv_both",
        kv_connector_extra_config={"host_pool_gib": size_gib, _MARK: _US},
    )
    logger.info("vllm: HiSparse by hisparse.host_gib_per_node: %d pools of %.2f GiB on this node", pools, size_gib)
    if parallel.data_parallel_size > max(1, parallel.data_parallel_size_local):
        logger.warning(
            "vllm: hisparse.host_gib_per_node is shared out over the engines of this start: several starts on one node "
            "take that much each"
        )


def pools_on_node(vllm_config: Any) -> int:
    """Host pools of this start on this node: one an engine where its ranks share it, else one a rank."""
    from vllm.v1.hisparse.runtime import use_shared_hisparse_host_pool

    parallel = vllm_config.parallel_config
    ranks = local_ranks(parallel)
    # The host's question fails where no engine of the start is on this node.
    shared = parallel.data_parallel_size_local != 0 and use_shared_hisparse_host_pool(vllm_config)
    return ranks // int(parallel.local_world_size) if shared else ranks


def _reasons(vllm_config: Any) -> Iterator[str]:
    """What vLLM's HiSparse would refuse without a word about our setting."""
    model = vllm_config.model_config
    if model is not None and not hasattr(model.hf_config, "index_topk"):
        yield f"model {model.model}: expected a DSA model (MLA with index_topk)"
    yield from split_sizes(vllm_config.parallel_config, "pipeline_parallel_size", "decode_context_parallel_size")
    if vllm_config.cache_config.kv_offloading_size is not None:
        yield f"--kv-offloading-size: expected none, got {vllm_config.cache_config.kv_offloading_size}"


def _hot_tokens(vllm_config: Any, ours: HiSparseSettings) -> int | None:
    """Slots of a request's hot buffer; None leaves them to vLLM."""
    if not ours.hot_tokens or vllm_config.model_config is None:
        return ours.hot_tokens or None
    return hot_tokens(vllm_config, most_slots=INT16_SLOTS)
