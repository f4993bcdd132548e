"""What HiSparse adds to vLLM's V1 model runner, mixed in before the host's class; nothing while HiSparse is off."""

from __future__ import annotations

from typing import Any

from baige_device.engines.vllm import hisparse
from baige_device.engines.vllm.ledger import LEDGER

__all__ = ["HiSparseRunner", "note_hisparse_seams"]

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SEAMS = (
    f"{_RUNNER}.get_kv_cache_spec",
    f"{_RUNNER}.maybe_add_kv_sharing_layers_to_kv_cache_groups",
    f"{_RUNNER}.initialize_kv_cache_tensors",
    f"{_RUNNER}.execute_model",
)


def note_hisparse_seams() -> None:
    """Record the seams. Raises `MountError` when one is missing."""
    for target in _SEAMS:
        LEDGER.note_seam(target)


class HiSparseRunner:
    """Sparse layers leave vLLM's specs, get pools of ours, and hot rows follow the scheduler's decisions."""

    vllm_config: Any
    input_batch: Any
    compilation_config: Any
    shared_kv_cache_layers: dict[str, str]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The host's specs without the sparse layers, which it then treats as users of the index keys' blocks."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        coordinator = hisparse.active()
        if coordinator is not None:
            layers = self.compilation_config.static_forward_context
            self.shared_kv_cache_layers |= coordinator.claim(specs, layers)
        return specs

    def initialize_kv_cache_tensors(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The host's tensors, then the pools; sparse layers are bound to host rows."""
        tensors: dict[str, Any] = super().initialize_kv_cache_tensors(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        coordinator = hisparse.active()
        if coordinator is not None:
            coordinator.allocate(kv_cache_config.num_blocks, lambda: self.input_batch)
        return tensors

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Follow what the scheduler decided, then run the step."""
        coordinator = hisparse.active()
        if coordinator is not None:
            coordinator.observe(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
