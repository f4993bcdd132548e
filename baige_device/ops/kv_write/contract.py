"""Contract of `kv_write`."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.ops.base import (
    INDEX_DTYPES,
    Cost,
    OpContract,
    check_distinct,
    check_dtype,
    check_index_values,
    check_inner_contiguous,
    check_number,
    check_same_device,
    check_shape,
)

__all__ = ["CONTRACT", "kv_write"]

_OP = "kv_write"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8)


def kv_write(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the new tokens' rows into the slots of a paged cache: `cache[slot // N, slot % N] = values[t]`.

    One call writes one cache: keys, values, an MLA latent, or index keys.

    Args:
        values: `[T, G, D]`; any outer strides, D dense. T may be less than the number of slots (graph padding): the
            slots behind are ignored.
        cache: `[P, N, G, D]`, any outer strides, D dense, updated. Rows whose slot is not named keep their content.
        slots: int32 or int64 `[T']`, T' >= T. -1 writes nothing. A slot must not appear twice.
    Raises:
        ContractError: shapes, dtypes or devices; with checked values, a slot outside `[-1, P*N)` or named twice.
    A floating-point `values` of another dtype than the cache is converted (round to nearest), no scaling. Into a float8
    cache it saturates: what is beyond its range, infinities too, becomes the largest finite value of the same sign (448
    for e4m3fn). NaN stays NaN.
    Cost: reads and writes T rows.
    """


def check(checked_values: bool, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    check_dtype(_OP, "values", values, _DTYPES)
    check_shape(_OP, "values", values, ("T", "G", "D"))
    check_shape(_OP, "cache", cache, ("P", "N", values.shape[1], values.shape[2]))
    if not (values.is_floating_point() and cache.is_floating_point()):
        check_dtype(_OP, "cache", cache, (values.dtype,))
    check_inner_contiguous(_OP, "values", values)
    check_inner_contiguous(_OP, "cache", cache)
    check_dtype(_OP, "slots", slots, INDEX_DTYPES)
    check_shape(_OP, "slots", slots, ("T'",))
    check_number(_OP, "slots.shape[0]", slots.shape[0], values.shape[0])
    check_same_device(_OP, cache=cache, values=values, slots=slots)
    if checked_values:
        named = slots[: values.shape[0]]
        check_index_values(_OP, "slots", named, cache.shape[0] * cache.shape[1])
        check_distinct(_OP, "slots", named)


def cost(values: Tensor, cache: Tensor, slots: Tensor) -> Cost:
    """Bytes read and written."""
    return Cost(values.numel() * (values.element_size() + cache.element_size()))


CONTRACT = OpContract(
    _OP, "attention", kv_write, check, cost, "kv_write(Tensor values, Tensor(a!) cache, Tensor slots) -> ()"
)
