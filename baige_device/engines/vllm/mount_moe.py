"""Take the one place that vLLM has for an out-of-tree unquantised MoE method, unless someone else holds it."""

from __future__ import annotations

from baige_device.engines.vllm.ledger import LEDGER
from baige_device.errors import MountError

__all__ = ["mount_moe"]

_BASE = "vllm.model_executor.layers.fused_moe"
_SEAM = f"{_BASE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.register_oot"
_NAME = "UnquantizedFusedMoEMethod"


def mount_moe() -> None:
    """Register our MoE method. Idempotent.

    Raises:
        MountError: another plugin has registered one, or a target is missing.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    if _SEAM in LEDGER.applied:
        return
    LEDGER.resolve(_SEAM)
    holder = op_registry_oot.get(_NAME)
    if holder is not None:
        raise MountError(
            f"vllm: {_NAME} is already replaced by {holder.__module__}.{holder.__qualname__}; name one plugin in "
            "VLLM_PLUGINS"
        )
    import baige_device.engines.vllm.moe  # noqa: F401  (registers on import, as the host's decorator wants)

    LEDGER.note_seam(_SEAM)
    LEDGER.note_seam(f"{_BASE}.modular_kernel:FusedMoEPrepareAndFinalizeModular")
