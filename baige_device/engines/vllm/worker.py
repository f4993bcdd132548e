"""Worker and model runner of our platform: activation, mounts and self-check, then the host's runner."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import psutil
import torch

# First of all: it replaces torch's accelerator calls by ones that do nothing on a host device.
import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from baige_device.engines.vllm.hisparse_runner import HiSparseRunner
from baige_device.engines.vllm.rank import Rank
from baige_device.errors import HostMemoryError

__all__ = ["BaigeModelRunner", "BaigeWorker"]

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Enough to judge answers by; host memory belongs to others, too."""


class BaigeModelRunner(HiSparseRunner, CPUModelRunner):
    """The host's runner for host tensors."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load, then finish weight offloading, which the host's CPU runner leaves out."""
        from vllm.model_executor.offloader import get_offloader

        super().load_model(load_dummy_weights)
        get_offloader().post_init()


class BaigeWorker(Rank, Worker):
    """One rank on host tensors."""

    def init_device(self) -> None:
        """Mount, join the process group, activate, check, and make the runner."""
        self.device = torch.device("cpu")
        self.start()

    def _make_model_runner(self) -> BaigeModelRunner:
        return BaigeModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: `--kv-cache-memory-bytes`, else a quarter of the free memory, at most 4 GiB."""
        with torch.inference_mode():
            self.model_runner.profile_run()  # in eager mode this also makes the buffers of later pipeline stages
        free = int(psutil.virtual_memory().available)
        asked = self.cache_config.kv_cache_memory_bytes
        if asked and asked > free:
            raise HostMemoryError(f"kv_cache_memory_bytes: asked for {asked} bytes, {free} are free; ask for less")
        share = free // 4 // self.parallel_config.local_world_size
        return self.kv_budget_bytes(int(asked or min(share, DEFAULT_KV_CACHE_BYTES)))

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled; the seed is set anew because profiling drew random numbers."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
