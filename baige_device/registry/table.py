"""The frozen table of chosen ops: what the hot path calls. One attribute per op, no lookups, no hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from baige_device.errors import BackendError, OpUnsupported
from baige_device.ops import OP_NAMES, contract
from baige_device.registry.bind import bind
from baige_device.registry.offers import Tier
from baige_device.registry.resolve import Candidate, Resolution
from baige_device.registry.signature import mismatch

if TYPE_CHECKING:
    from baige_device.ops.attend_paged import contract as _attend_paged
    from baige_device.ops.dequantize_blocks import contract as _dequantize_blocks
    from baige_device.ops.fp8_all_gather import contract as _fp8_all_gather
    from baige_device.ops.host_alloc import contract as _host_alloc
    from baige_device.ops.hot_cache_resolve import contract as _hot_cache_resolve
    from baige_device.ops.index_topk import contract as _index_topk
    from baige_device.ops.kv_write import contract as _kv_write
    from baige_device.ops.merge_attention import contract as _merge_attention
    from baige_device.ops.moe_combine import contract as _moe_combine
    from baige_device.ops.moe_dispatch import contract as _moe_dispatch
    from baige_device.ops.moe_expert_ffn import contract as _moe_expert_ffn
    from baige_device.ops.quantize_blocks import contract as _quantize_blocks
    from baige_device.ops.sparse_attention import contract as _sparse_attention
    from baige_device.ops.uva_sparse_gather import contract as _uva_sparse_gather
    from baige_device.ops.uva_sparse_scatter import contract as _uva_sparse_scatter

__all__ = ["OpTable", "load_target"]

Checks = Literal["auto", "none", "shapes", "values"]


class OpTable:
    """One callable per op, bound once at activation and never changed.

    `table.kv_write(...)` runs the contract's checks (see `Settings.checks`), counts the call and runs the chosen
    implementation. An op that the backend does not serve raises `OpUnsupported` with the reason kept from resolution;
    mounts ask `serves(op)` first when they can live without it.

    Raises:
        BackendError: a chosen implementation cannot be imported, or does not take the contract's arguments.
    """

    if TYPE_CHECKING:  # the contracts' signatures, for readers, editors and mypy
        host_alloc = staticmethod(_host_alloc.host_alloc)
        uva_sparse_gather = staticmethod(_uva_sparse_gather.uva_sparse_gather)
        uva_sparse_scatter = staticmethod(_uva_sparse_scatter.uva_sparse_scatter)
        hot_cache_resolve = staticmethod(_hot_cache_resolve.hot_cache_resolve)
        quantize_blocks = staticmethod(_quantize_blocks.quantize_blocks)
        dequantize_blocks = staticmethod(_dequantize_blocks.dequantize_blocks)
        fp8_all_gather = staticmethod(_fp8_all_gather.fp8_all_gather)
        attend_paged = staticmethod(_attend_paged.attend_paged)
        sparse_attention = staticmethod(_sparse_attention.sparse_attention)
        merge_attention = staticmethod(_merge_attention.merge_attention)
        index_topk = staticmethod(_index_topk.index_topk)
        kv_write = staticmethod(_kv_write.kv_write)
        moe_dispatch = staticmethod(_moe_dispatch.moe_dispatch)
        moe_expert_ffn = staticmethod(_moe_expert_ffn.moe_expert_ffn)
        moe_combine = staticmethod(_moe_combine.moe_combine)

    def __init__(self, backend: str, resolutions: Mapping[str, Resolution], checks: Checks = "auto") -> None:
        bound: dict[str, Callable[..., Any]] = {}
        counters: dict[str, Callable[[], int]] = {}
        for op, resolution in resolutions.items():
            if resolution.chosen is not None:
                mode = _mode(checks, resolution.chosen)
                bound[op], counters[op] = bind(
                    contract(op), load_target(op, resolution.chosen), check=mode != "none", values=mode == "values"
                )
        object.__setattr__(self, "_backend", backend)
        object.__setattr__(self, "_reasons", {op: resolution.reason for op, resolution in resolutions.items()})
        object.__setattr__(self, "_counters", counters)
        for op, function in bound.items():
            object.__setattr__(self, op, function)

    def serves(self, op: str) -> bool:
        """Whether the op is bound. Raises `KeyError` for a name that is no op."""
        if op not in OP_NAMES:
            raise KeyError(f"unknown op {op!r}; known: {', '.join(OP_NAMES)}")
        return op in self._counters

    def calls(self) -> dict[str, int]:
        """Python calls per bound op since activation. Replays of a captured graph make no Python call."""
        return {op: calls() for op, calls in self._counters.items()}

    def __getattr__(self, name: str) -> Any:
        if name in OP_NAMES:
            raise OpUnsupported(name, self._backend, self._reasons.get(name, "it was never resolved"))
        raise AttributeError(f"OpTable has no op {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"OpTable is frozen; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"OpTable is frozen; {name!r} cannot be deleted")


def _mode(checks: Checks, chosen: Candidate) -> Checks:
    if checks != "auto":
        return checks
    return "shapes" if chosen.offer.tier is Tier.REFERENCE else "none"


def load_target(op: str, chosen: Candidate) -> Callable[..., Any]:
    """Import the chosen implementation and hold its signature against the contract's.

    Raises:
        BackendError: it cannot be imported, is no callable, or would refuse the arguments of every call.
    """
    offered = f"{op}: backend {chosen.backend!r} offers {chosen.offer.label}"
    try:
        function: object = chosen.offer.load()
    except (Exception, SystemExit) as error:  # a module of somebody's package raises anything
        raise BackendError(f"{offered}, which cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise BackendError(f"{offered}: expected a callable, got {function!r}")
    wrong = mismatch(contract(op), function)
    if wrong:
        raise BackendError(f"{offered}, which {wrong}")
    return function
