"""The abstract ops: one folder each, with the contract, the plain-torch reference and the mathematics.

`OP_NAMES` is the closed list. A new op needs a folder here, a hook in `registry/hookspecs.py`, a reference offer, a
suite in `testing/` and a page in `docs/`; a test fails while one of them is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baige_device.ops.base import OpContract

__all__ = ["FAMILIES", "OP_NAMES", "contract"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "gather": ("host_alloc", "uva_sparse_gather", "uva_sparse_scatter", "hot_cache_resolve"),
    "weights": ("quantize_blocks", "dequantize_blocks", "fp8_all_gather"),
    "attention": ("attend_paged", "sparse_attention", "merge_attention", "index_topk", "kv_write"),
    "moe": ("moe_dispatch", "moe_expert_ffn", "moe_combine"),
}
OP_NAMES: tuple[str, ...] = tuple(name for names in FAMILIES.values() for name in names)


def contract(name: str) -> OpContract:
    """The contract of one op. Raises `KeyError` for a name that is not in `OP_NAMES`."""
    if name not in OP_NAMES:
        raise KeyError(f"unknown op {name!r}; known: {', '.join(OP_NAMES)}")
    loaded: OpContract = importlib.import_module(f"baige_device.ops.{name}.contract").CONTRACT
    return loaded
