"""SGLang's HiSparse swap-in kernel as a peer: its own JIT module, built beforehand.

`BENCH_SGLANG_LIB` is the library of `load_cache_to_device_buffer` for 656-byte rows, top-k 2048 and 4096 hot
tokens; the package `apache-tvm-ffi` loads it. Nothing of it is in this repository.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.hisparse_layer import HOT_TOKENS, ROW_BYTES, TOPK

__all__ = ["SglangSwapIn", "sglang_available"]


def sglang_available() -> bool:
    """Whether the library is named and can be loaded."""
    return bool(os.environ.get("BENCH_SGLANG_LIB"))


@functools.lru_cache(maxsize=1)
def _module() -> Any:
    import tvm_ffi  # type: ignore[import-not-found]

    return tvm_ffi.load_module(os.environ["BENCH_SGLANG_LIB"])


class SglangSwapIn:
    """SGLang's tables for `batch` requests of `context` tokens whose host rows lie one request after the other."""

    def __init__(self, host: Tensor, batch: int, context: int) -> None:
        slots = HOT_TOKENS + 1
        self.host = host
        self.rows = torch.zeros(-(-batch * slots // 64) * 64, ROW_BYTES, dtype=torch.uint8, device="cuda")
        self._tokens = torch.full((batch + 1, slots), -1, dtype=torch.int32, device="cuda")
        self._locations = torch.arange((batch + 1) * slots, dtype=torch.int32, device="cuda").view(batch + 1, slots)
        host_rows = torch.arange(batch * context, device="cuda").view(batch, context)
        self._host_rows = torch.cat([host_rows, host_rows[-1:]])
        self._found = torch.empty(batch, TOPK, dtype=torch.int32, device="cuda")
        self._requests = torch.arange(batch, device="cuda")
        self._lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self._order = torch.arange(HOT_TOKENS, dtype=torch.int16, device="cuda").repeat(batch + 1, 1)
        self._count = torch.tensor([batch], dtype=torch.int32, device="cuda")
        self._none = torch.empty(0, device="cuda")

    def __call__(self, topk: Tensor) -> Tensor:
        """Swap in and return the device rows int32 `[batch, 2048]`; resolve and copy are one kernel."""
        none = self._none
        _module().load_cache_to_device_buffer(
            topk, self._tokens, self._host_rows, self._locations, self.host, none, self.rows, none, self._found,
            self._requests, self._lengths, self._order, self._count, 1, ROW_BYTES, none, none, none,
        )  # fmt: skip
        return self._found
