"""vLLM's platform and worker for a chip with device tensors: Kunlun, whose tensors say `cuda` (torch_xmlir).

Not run on hardware: no chip was at hand, and the vendor's public builds are for an older torch than vLLM asks for.
Device type, collectives and page size are the probe's facts; everything that is not device memory is inherited from
the platform for host tensors, which the Kunlun emulator exercises.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from baige_device.engines.vllm.platform import BaigePlatform
from baige_device.engines.vllm.rank import Rank
from baige_device.registry.choice import choose
from baige_device.settings import load_settings

__all__ = ["ChipPlatform", "ChipWorker"]

_DEVICE = choose(load_settings().backend).device


def _module() -> Any:
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
        return int(_module().mem_get_info(device_id)[1])

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(_module().max_memory_allocated(device))

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        _module().set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        _module().manual_seed_all(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "baige_device.engines.vllm.communicator.ChipCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "baige_device.engines.vllm.chip.ChipWorker"
        super().check_and_update_config(vllm_config)


class ChipWorker(Rank, Worker):
    """One rank on one chip."""

    def init_device(self) -> None:
        """Take the chip, then mount, join the process group, activate, check, and make the runner."""
        self.device = torch.device(_DEVICE.torch_device, self.local_rank)
        _module().set_device(self.device)
        self.start()

    def _make_model_runner(self) -> Any:
        return GPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: as asked, else what the utilisation leaves after weights and a profiling run."""
        with torch.inference_mode():
            self.model_runner.profile_run()
        _module().synchronize()
        free, total = _module().mem_get_info(self.device)
        unused = total * (1 - self.cache_config.gpu_memory_utilization)
        return int(self.cache_config.kv_cache_memory_bytes or free - unused)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled; the seed is set anew because profiling drew random numbers."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)
