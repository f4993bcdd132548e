"""What vLLM takes for FLASHMLA_SPARSE, and its options, when its platform is NVIDIA's; no device is touched."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any


def main() -> None:
    pretend()
    from vllm.config import DeviceConfig, VllmConfig

    from baige_device.engines.entry import vllm_general

    vllm_general()
    vllm_general()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.FLASHMLA_SPARSE
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    transfer = config.kv_transfer_config
    answer = {
        "class": backend.get_path(),
        "name": backend.name,
        "pool": transfer and transfer.kv_connector_extra_config,
        "hisparse": config.attention_config.hisparse_config is not None,
    }
    print("ANSWER " + json.dumps(answer), flush=True)


def pretend() -> None:
    """Let vLLM find an H200 where it asks while it configures itself."""
    for library in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):  # they need the driver
        sys.modules[f"vllm.{library}"] = ModuleType(f"vllm.{library}")
    import vllm.platforms
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H200(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

    class Connector:  # the host's own loads its compiled library
        requires_piecewise_for_cudagraph = staticmethod(lambda extra: False)

    factory: Any = KVConnectorFactory
    factory.get_connector_class = classmethod(lambda cls, config: Connector)
    factory.supports_hma_config = classmethod(lambda cls, config: True)
    vllm.platforms._current_platform = H200()


if __name__ == "__main__":
    main()
