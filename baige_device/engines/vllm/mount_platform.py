"""What our platform changes in every process of the engine, and what it mounts in a worker."""

from __future__ import annotations

from baige_device.engines.vllm.compat import has_kernel_registry
from baige_device.engines.vllm.ledger import LEDGER

__all__ = ["mount_features", "mount_process"]


def mount_process() -> None:
    """Let the host shut down on a machine without accelerator; front end, core and workers. Idempotent."""
    LEDGER.patch("torch:accelerator.empty_cache", lambda _: _nothing)
    LEDGER.patch("torch:accelerator.empty_host_cache", lambda _: _nothing)


def mount_features(features: tuple[str, ...]) -> None:
    """Use the seams and apply the patches of these features in a worker. Idempotent.

    Raises:
        MountError: a target is missing, or another plugin holds the one place that a row needs.
    """
    from baige_device.engines.vllm.named_ops import define_named_ops

    define_named_ops()
    if has_kernel_registry():
        from baige_device.engines.vllm.kernels import register_kernels

        register_kernels()
    for target in ("vllm.platforms.interface:Platform", "vllm.v1.worker.gpu_worker:Worker.init_device"):
        LEDGER.note_seam(target)
    if "cpu" in features:
        mount_process()
        LEDGER.note_seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner")
        LEDGER.note_seam("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator")
    if "moe" in features:
        from baige_device.engines.vllm.mount_moe import mount_moe

        mount_moe()
    if "dsa" in features:
        from baige_device.engines.vllm.indexer import mount_indexer

        mount_indexer()
    if "hisparse" in features:
        from baige_device.engines.vllm.hisparse_runner import note_hisparse_seams

        note_hisparse_seams()
    if "grammar" in features:
        from baige_device.engines.vllm.grammar import mount_grammar

        mount_grammar()


def _nothing() -> None:
    """There is no accelerator whose cache could be emptied."""
