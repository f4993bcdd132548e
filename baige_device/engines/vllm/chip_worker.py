"""The worker on the platform of `chip.py`. Not run on hardware."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from baige_device.engines.vllm.chip import device_module
from baige_device.engines.vllm.hisparse_runner import HiSparseRunner
from baige_device.engines.vllm.rank import Rank

__all__ = ["ChipModelRunner", "ChipWorker"]


class ChipModelRunner(HiSparseRunner, GPUModelRunner):
    """The host's runner for device tensors."""


class ChipWorker(Rank, Worker):
    """One rank on one chip."""

    def init_device(self) -> None:
        """Take the chip, then mount, join the process group, activate, check, and make the runner."""
        self.device = torch.device(current_platform.device_type, self.local_rank)
        device_module().set_device(self.device)
        self.start()

    def _make_model_runner(self) -> Any:
        return ChipModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: as asked, else what the utilisation leaves after weights and a profiling run."""
        with torch.inference_mode():
            self.model_runner.profile_run()
        device_module().synchronize()
        free, total = device_module().mem_get_info(self.device)
        unused = total * (1 - self.cache_config.gpu_memory_utilization)
        return self.kv_budget_bytes(int(self.cache_config.kv_cache_memory_bytes or free - unused))

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled; the seed is set anew because profiling drew random numbers."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)
