"""What a worker of ours does on any chip: start with everything mounted and verified, and report."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from baige_device.activation import current
from baige_device.engines.vllm import hisparse
from baige_device.engines.vllm.compat import WINDOW, init_runner
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.mount_platform import mount_features
from baige_device.engines.vllm.needs import features_of, needs_of
from baige_device.engines.vllm.process import activate_process
from baige_device.errors import ActivationError

__all__ = ["Rank"]

logger = logging.getLogger("baige_device")


class Rank:
    """Mixed into the host's worker."""

    vllm_config: Any
    model_config: Any
    rank: int
    local_rank: int
    distributed_init_method: str
    device: torch.device

    def start(self) -> None:
        """Mount, join the process group, activate, check that everything is mounted, and make the model runner.

        `self.device` is set. Raises `MountError`, `OpUnsupported` or `RankMismatch`, which end the start.
        """
        WINDOW.check()
        features = features_of(self.vllm_config)
        mount_features(features)
        init_worker_distributed_environment(
            vllm_config=self.vllm_config,
            rank=self.rank,
            local_rank=self.local_rank,
            distributed_init_method=self.distributed_init_method,
            backend=current_platform.dist_backend,
        )
        activation = activate_process(self.vllm_config, needs_of(self.vllm_config))
        hisparse.activate(self.vllm_config, activation, self.device)
        LEDGER.verify_applied(features)
        set_random_seed(self.model_config.seed)
        init_runner(self)

    def baige_report(self) -> dict[str, Any]:
        """For `collective_rpc("baige_report")`: the activation record, the calls of each op, and what is mounted."""
        active = current()
        coordinator = hisparse.active()
        return {
            "record": active.record.as_dict(),
            "calls": active.ops.calls(),
            "mounted": sorted(LEDGER.applied),
            "hisparse": coordinator.report() if coordinator is not None else {},
        }

    def kv_budget_bytes(self, device_bytes: int) -> int:
        """What vLLM may plan its blocks with, of `device_bytes` for all KV."""
        coordinator = hisparse.active()
        return device_bytes if coordinator is None else coordinator.kv_budget_bytes(device_bytes)

    def shutdown(self) -> None:
        """Log how often each op was called, then shut down; a start that failed before activation has no calls."""
        with contextlib.suppress(ActivationError):
            calls = {op: count for op, count in current().ops.calls().items() if count}
            logger.info("rank %d op calls: %s", self.rank, ", ".join(f"{op} {count}" for op, count in calls.items()))
        coordinator = hisparse.active()
        if coordinator is not None:
            coordinator.close()
        super().shutdown()  # type: ignore[misc]
