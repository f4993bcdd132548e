"""From wanted positions to rows of paged pools, around `hot_cache_resolve`: two small kernels beside the op table.

An engine whose hot buffer, host pool and resident pages are all paged has to turn positions into lookup keys and slots
into rows. In torch that is a dozen launches a layer; here it is two.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baige_device.backends.cuda.driver import Kernel, context, kernel

__all__ = ["SwapParams", "address", "launch_to_keys", "launch_to_rows"]

_THREADS = 1024


class SwapParams(ctypes.Structure):
    """The kernels' only parameter; `csrc/swap_plan.cu` says what each field is. Addresses are device addresses."""

    _fields_ = (
        [
            (name, ctypes.c_uint64)
            for name in (
                "positions",
                "requests",
                "valid_rows",
                "states",
                "source_table",
                "hot_table",
                "resident_table",
                "keys",
                "state_rows",
                "rows",
                "slots",
                "miss_slots",
                "miss_counts",
                "miss_rows",
                "valid_counts",
                "stats",
                "hit_rows",
                "late_rows",
            )
        ]
        + [(name, ctypes.c_int64) for name in ("positions_stride", "source_stride", "hot_stride", "resident_stride")]
        + [
            (name, ctypes.c_int32)
            for name in ("wanted", "page_rows", "page_stride", "resident_rows", "resident_null", "hot_slots")
        ]
    )


def launch_to_keys(params: SwapParams, num_rows: int, device: int) -> None:
    """Write `keys`, `state_rows`, and in `rows` the rows of resident pages (-1 elsewhere), on the current stream."""
    _launch("to_keys", params, num_rows, device, split=False)


def launch_to_rows(params: SwapParams, num_rows: int, device: int, *, split: bool) -> None:
    """Complete `rows` from the lookup's slots and write the copy's destinations; with `split` also the two lists for
    attention that overlaps the copy. On the current stream."""
    _launch("to_rows", params, num_rows, device, split=split)


def _launch(name: str, params: SwapParams, num_rows: int, device: int, *, split: bool) -> None:
    shared_bytes = -(-params.hot_slots // 32) * 4 if split else 0
    with context(device):
        function = _function(device, name, split)
        function.launch(num_rows, _THREADS, torch._C._cuda_getCurrentRawStream(device), params, shared_bytes)


@functools.lru_cache(maxsize=64)
def _function(device: int, name: str, split: bool) -> Kernel:
    return kernel(device, "swap_plan.cu", name, {"THREADS": _THREADS, "SPLIT": int(split)})


def address(tensor: Tensor | None) -> int:
    """A tensor's address for a field of `SwapParams`; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
