"""Worker and model runner of our platform: activation, mounts and self-check, then the host's runner."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

# First of all: it replaces torch's accelerator calls by ones that do nothing on a host device.
import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from baige_device.activation import current
from baige_device.engines.vllm.compat import WINDOW, init_runner
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.mount_platform import mount_features
from baige_device.engines.vllm.needs import features_of, needs_of
from baige_device.engines.vllm.process import activate_process
from baige_device.errors import HostMemoryError

__all__ = ["BaigeModelRunner", "BaigeWorker"]

logger = logging.getLogger("baige_device")

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Enough to judge answers by; host memory belongs to others, too."""


class BaigeModelRunner(CPUModelRunner):
    """The host's runner for host tensors."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load, then finish weight offloading, which the host's CPU runner leaves out."""
        from vllm.model_executor.offloader import get_offloader

        super().load_model(load_dummy_weights)
        get_offloader().post_init()


class BaigeWorker(Worker):
    """One rank."""

    def init_device(self) -> None:
        """Mount, join the process group, activate, and check that everything that was to be mounted is."""
        WINDOW.check()
        features = features_of(self.vllm_config)
        mount_features(features)
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            vllm_config=self.vllm_config,
            rank=self.rank,
            local_rank=self.local_rank,
            distributed_init_method=self.distributed_init_method,
            backend=current_platform.dist_backend,
        )
        activate_process(self.vllm_config, needs_of(self.vllm_config))
        LEDGER.verify_applied(features)
        set_random_seed(self.model_config.seed)
        init_runner(self)

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
        return int(asked or min(share, DEFAULT_KV_CACHE_BYTES))

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled; the seed is set anew because profiling drew random numbers."""
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def baige_report(self) -> dict[str, Any]:
        """For `collective_rpc("baige_report")`: the activation record, the calls of each op, and what is mounted."""
        active = current()
        return {"record": active.record.as_dict(), "calls": active.ops.calls(), "mounted": sorted(LEDGER.applied)}

    def shutdown(self) -> None:
        """Log how often each op was called, then shut down."""
        calls = {op: count for op, count in current().ops.calls().items() if count}
        logger.info("rank %d op calls: %s", self.rank, ", ".join(f"{op} {count}" for op, count in calls.items()))
        super().shutdown()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
