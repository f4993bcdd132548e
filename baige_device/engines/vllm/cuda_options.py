"""`hisparse.host_gib_per_node` on NVIDIA: it becomes vLLM's own HiSparse options when vLLM makes its configuration.

vLLM derives a KV connector from its own offloading options at the same place. Options of vLLM's that are given win.
"""

from __future__ import annotations

import logging
from typing import Any

from baige_device.engines.vllm.hisparse_sizes import local_ranks
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.options import engine_settings

__all__ = ["CONNECTOR", "given_by_setting", "mount_options"]

logger = logging.getLogger("baige_device")

CONNECTOR = "HiSparseConnector"
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
        original(self)

    return configure


def given_by_setting(vllm_config: Any) -> bool:
    """Whether HiSparse is on by our setting and not by vLLM's options."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector_extra_config.get(_MARK) == _US


def give_options(vllm_config: Any) -> None:
    """Set vLLM's options if our setting asks for HiSparse and none of them is set.

    Raises:
        SettingsError: an unknown option of ours or a bad value.
    """
    ours = engine_settings(vllm_config).hisparse
    theirs = vllm_config.attention_config.hisparse_config, vllm_config.kv_transfer_config
    if not ours.enabled or any(option is not None for option in theirs):
        return
    from vllm.config import KVTransferConfig
    from vllm.config.attention import HiSparseConfig

    pools = pools_on_node(vllm_config)
    size_gib = ours.host_gib_per_node / pools
    vllm_config.attention_config.hisparse_config = HiSparseConfig(device_buffer_size=ours.hot_tokens or None)
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role="kv_both",
        kv_connector_extra_config={"host_pool_gib": size_gib, _MARK: _US},
    )
    logger.info("vllm: HiSparse by hisparse.host_gib_per_node: %d pools of %.2f GiB on this node", pools, size_gib)


def pools_on_node(vllm_config: Any) -> int:
    """Host pools of this server on this node: one an engine where its ranks share it, else one a rank."""
    from vllm.v1.hisparse.runtime import use_shared_hisparse_host_pool

    parallel = vllm_config.parallel_config
    ranks = local_ranks(parallel)
    return ranks // int(parallel.local_world_size) if use_shared_hisparse_host_pool(vllm_config) else ranks
