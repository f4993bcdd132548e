"""vLLM's platform for a chip with device tensors: Kunlun, whose tensors say `cuda` (torch_xmlir).

Not run on hardware: no chip was at hand, and the vendor's public builds are for an older torch than vLLM asks for.
Device type, collectives and page size are the probe's facts; everything that is not device memory is inherited from
the platform for host tensors, which the Kunlun emulator exercises.
"""

from __future__ import annotations

from typing import Any

import torch

from baige_device.engines.vllm.platform import BaigePlatform
from baige_device.registry.choice import choose
from baige_device.settings import load_settings

__all__ = ["ChipPlatform", "device_module"]

_DEVICE = choose(load_settings().backend).device


def device_module() -> Any:
    """`torch.cuda` for Kunlun. `torch.accelerator` is absent or incomplete in the vendor's torch."""
    return torch.get_device_module(_DEVICE.torch_device)


class ChipPlatform(BaigePlatform):
    """An out-of-tree platform on the chip's torch device. Eager mode, V1 runner, no Triton."""

    device_name = _DEVICE.torch_device
    device_type = _DEVICE.torch_device
    dispatch_key = _DEVICE.torch_device.upper()
    device_control_env_var = "CUDA_VISIBLE_DEVICES"  # the runtime honours it beside XPU_VISIBLE_DEVICES

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(device_module().mem_get_info(device_id)[1])

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(device_module().max_memory_allocated(device))

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        device_module().set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        device_module().manual_seed_all(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "baige_device.engines.vllm.communicator.ChipCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "baige_device.engines.vllm.chip_worker.ChipWorker"
        super().check_and_update_config(vllm_config)
