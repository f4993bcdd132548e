"""vLLM on NVIDIA keeps its own platform; this puts our sparse attention backend in the place of its own."""

from __future__ import annotations

import logging

from baige_device.engines.vllm.compat import CUDA_WINDOW, WINDOW
from baige_device.engines.vllm.cuda_options import mount_options
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.errors import MountError
from baige_device.settings import Settings

__all__ = ["BACKEND", "mount_cuda"]

logger = logging.getLogger("baige_device")

BACKEND = "baige_device.engines.vllm.cuda_attention.FlashMlaBackend"
_REPLACED = "vllm.v1.attention.backends.mla.flashmla_sparse:FlashMLASparseImpl"


def mount_cuda(settings: Settings) -> None:
    """Let `FLASHMLA_SPARSE` be our class; it decides what else is on when its first layer is built. Idempotent.

    Imports nothing of the host's attention and touches no device, since it runs in the front end, too.

    Raises:
        MountError: another plugin has replaced the backend, or the host is outside the window, and ours was asked for
            by name (`BAIGE_BACKEND=cuda`). With `auto` both leave the host as it is, with a log line.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    complaint = None
    member = AttentionBackendEnum.FLASHMLA_SPARSE
    if not WINDOW.row_applies(CUDA_WINDOW):
        complaint = f"vllm {WINDOW.installed()}: our CUDA mounts fit {CUDA_WINDOW}"
    elif member.is_overridden() and member.get_path() != BACKEND:
        complaint = f"vllm: another plugin has replaced the backend {member.name} by {member.get_path()}"
    if complaint is None:
        register_backend(member, BACKEND)
        LEDGER.note_seam("vllm.v1.attention.backends.registry:register_backend")
        mount_options()
        return
    if settings.backend == "cuda":
        raise MountError(f"{complaint}; set BAIGE_BACKEND=off to run without baige-device")
    logger.warning("%s; sparse attention and HiSparse stay the host's", complaint)
