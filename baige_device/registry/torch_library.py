"""The ops as `torch.ops.baige.*`, for torch.compile and for graphs of other frameworks.

The schemas are the contracts' strings, so nothing is inferred and torch 2.5 is enough. Every op calls the table that is
active when it runs: activating again needs no second registration.

Not registered, because no schema can express them: `host_alloc` (returns an owner, not a tensor) and the MoE ops (an
opaque handle, a process group). Differences from the table's functions, also for want of a schema: output buffers are
not passed, `hot_cache_resolve` returns a plain tuple, and `fp8_all_gather` takes the group by its name ("" is the
default group) and waits before it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from baige_device.ops import OP_NAMES, contract
from baige_device.ops.hot_cache_resolve.contract import empty_plan
from baige_device.ops.quantize_blocks.contract import WIRE_FORMATS, scale_shape
from baige_device.registry.table import OpTable

__all__ = ["NAMESPACE", "install", "registered"]

NAMESPACE = "baige"

_lock = threading.Lock()
_library: torch.library.Library | None = None
_table: Callable[[], OpTable] | None = None


def install(table: Callable[[], OpTable]) -> None:
    """Register the ops, once per process; later calls only replace where the table comes from.

    `table` is called at every op call and may raise when nothing is active.
    """
    global _library, _table
    with _lock:
        _table = table
        if _library is None:
            _library = _register()


def registered() -> tuple[str, ...]:
    """Names of the ops that have a schema."""
    return tuple(op for op in OP_NAMES if contract(op).schema is not None)


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for op in registered():
        schema = contract(op).schema
        assert schema is not None
        library.define(schema)
        implementation = _calls.get(op) or _caller(op)
        library.impl(op, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{op}", _fakes[op], lib=library)
    return library


def _active(op: str) -> Callable[..., Any]:
    assert _table is not None
    function: Callable[..., Any] = getattr(_table(), op)
    return function


def _caller(op: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _active(op)(*args, **kwargs)

    return call


def _call_quantize_blocks(
    weight: Tensor, *, block: Sequence[int] = (128, 128), wire: str = "fp8_e4m3", name: str = ""
) -> tuple[Tensor, Tensor]:
    quantized: tuple[Tensor, Tensor] = _active("quantize_blocks")(weight, block=tuple(block), wire=wire, name=name)
    return quantized


def _call_dequantize_blocks(
    payload: Tensor, scales: Tensor, *, block: Sequence[int] = (128, 128), dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    weight: Tensor = _active("dequantize_blocks")(payload, scales, block=tuple(block), dtype=dtype)
    return weight


def _call_hot_cache_resolve(
    keys: Tensor, state_rows: Tensor, slot_keys: Tensor, lru_slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots, miss_keys, miss_slots, miss_counts = _active("hot_cache_resolve")(keys, state_rows, slot_keys, lru_slots)
    return slots, miss_keys, miss_slots, miss_counts


def _call_fp8_all_gather(shard: Tensor, shard_bytes: Sequence[int], *, group_name: str = "") -> Tensor:
    group = None
    if group_name:
        from torch.distributed import distributed_c10d

        group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined,arg-type]
    image: Tensor = _active("fp8_all_gather")(shard, list(shard_bytes), group=group).wait()
    return image


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _fake_attention(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[0], q.shape[1], width), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def _fake_attend_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *args: Tensor, v_dim: int = 0, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return _fake_attention(q, v_dim if v_cache is None else v_cache.shape[3])


def _fake_sparse_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor | None, indices: Tensor, *, v_dim: int = 0, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return _fake_attention(q, v_dim if v_rows is None else v_rows.shape[-1])


def _fake_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _fake_index_topk(q: Tensor, *args: Tensor, topk: int, **kwargs: Any) -> Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


def _fake_hot_cache_resolve(keys: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots, miss_keys, miss_slots, miss_counts = empty_plan(keys)
    return slots, miss_keys, miss_slots, miss_counts


def _fake_quantize_blocks(
    weight: Tensor, *, block: Sequence[int] = (128, 128), wire: str = "fp8_e4m3", name: str = ""
) -> tuple[Tensor, Tensor]:
    scales = scale_shape(weight.shape[0], weight.shape[1], (block[0], block[1]))
    return weight.new_empty(weight.shape, dtype=WIRE_FORMATS[wire][0]), weight.new_empty(scales, dtype=torch.float32)


def _fake_dequantize_blocks(
    payload: Tensor, scales: Tensor, *, block: Sequence[int] = (128, 128), dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return payload.new_empty(payload.shape, dtype=dtype)


def _fake_fp8_all_gather(shard: Tensor, shard_bytes: Sequence[int], *, group_name: str = "") -> Tensor:
    return shard.new_empty(sum(shard_bytes))


_calls: dict[str, Callable[..., Any]] = {
    "quantize_blocks": _call_quantize_blocks,
    "dequantize_blocks": _call_dequantize_blocks,
    "hot_cache_resolve": _call_hot_cache_resolve,
    "fp8_all_gather": _call_fp8_all_gather,
}

_fakes: dict[str, Callable[..., Any]] = {
    "uva_sparse_gather": _fake_nothing,
    "uva_sparse_scatter": _fake_nothing,
    "kv_write": _fake_nothing,
    "hot_cache_resolve": _fake_hot_cache_resolve,
    "quantize_blocks": _fake_quantize_blocks,
    "dequantize_blocks": _fake_dequantize_blocks,
    "fp8_all_gather": _fake_fp8_all_gather,
    "attend_paged": _fake_attend_paged,
    "sparse_attention": _fake_sparse_attention,
    "merge_attention": _fake_merge_attention,
    "index_topk": _fake_index_topk,
}
