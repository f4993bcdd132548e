"""What vLLM takes for FLASHMLA_SPARSE, and its options, when its platform is NVIDIA's; no device is touched."""

from __future__ import annotations

import json
import sys
from types import ModuleType


def main() -> None:
    for library in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):  # they need the driver
        sys.modules[f"vllm.{library}"] = ModuleType(f"vllm.{library}")
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    from vllm.config import DeviceConfig, VllmConfig

    VllmConfig.__post_init__ = lambda self: None  # asks the device for its capabilities

    from baige_device.engines.entry import vllm_general

    vllm_general()
    vllm_general()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.FLASHMLA_SPARSE
    transfer = VllmConfig(device_config=DeviceConfig(device="cpu")).kv_transfer_config
    pool = transfer and transfer.kv_connector_extra_config
    print("ANSWER " + json.dumps({"class": backend.get_path(), "name": backend.name, "pool": pool}), flush=True)


if __name__ == "__main__":
    main()
