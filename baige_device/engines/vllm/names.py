"""The names of our attention backends in vLLM's registry, and their registration."""

from __future__ import annotations

from baige_device.engines.vllm.compat import has_named_backends
from baige_device.engines.vllm.ledger import LEDGER

__all__ = ["DENSE", "INDEXER", "MLA", "SPARSE", "register_names"]

DENSE = "BAIGE"
MLA = "BAIGE_MLA"
SPARSE = "BAIGE_MLA_SPARSE"
INDEXER = "BAIGE_DSA_INDEXER"

CLASSES = {
    DENSE: "baige_device.engines.vllm.dense.DenseBackend",
    MLA: "baige_device.engines.vllm.mla.MlaBackend",
    SPARSE: "baige_device.engines.vllm.sparse_mla.SparseMlaBackend",
    INDEXER: "baige_device.engines.vllm.indexer.IndexerBackend",
}


def register_names() -> None:
    """Make our backends selectable by name (`--attention-backend BAIGE`); imports none of them. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    LEDGER.note_seam("vllm.v1.attention.backends.registry:register_backend")
    if not has_named_backends():
        register_backend(AttentionBackendEnum.CUSTOM, CLASSES[DENSE])
        return
    for name, path in CLASSES.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
