"""What the portable launchers share: chip size, block shapes, and Triton's two ways to run (compiled, interpreted)."""

from __future__ import annotations

import contextlib
import functools
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

__all__ = [
    "INTERPRET",
    "HeadBlocks",
    "best_splits",
    "dot_dtype",
    "head_blocks",
    "launching_on",
    "power_of_2",
    "processors",
]

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Triton reads the variable when a kernel is decorated, so it is fixed for the process."""

_CPU_PROCESSORS = 4  # the interpreter: enough that small cases take the split paths too


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device, the unit in which grids are sized."""
    if device.type == "cpu":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device, not on that of its arguments."""
    if tensor.device.type == "cpu" or torch.cuda.current_device() == tensor.device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def power_of_2(size: int, minimum: int = 16) -> int:
    """The smallest power of two >= size and >= minimum; 16 is the least edge of a matrix instruction."""
    return max(minimum, 1 << max(size - 1, 0).bit_length())


@dataclass(frozen=True)
class HeadBlocks:
    """A head size cut into two power-of-two columns blocks: 576 = 512 + 64, 192 = 128 + 64, 128 = 128 + 0."""

    first: int
    second: int


@functools.cache
def head_blocks(size: int) -> HeadBlocks:
    """Cut a head size so that no lane is wasted where that is possible, else round it up to one masked block."""
    whole = power_of_2(size)
    if whole == size:
        return HeadBlocks(size, 0)
    first = whole // 2
    rest = size - first
    if first >= 16 and rest >= 16 and rest & (rest - 1) == 0:
        return HeadBlocks(first, rest)
    return HeadBlocks(whole, 0)


def dot_dtype(*tensors: Tensor) -> tl.dtype:
    """Operand type of the matrix products: the common 16-bit type, else fp32.

    The interpreter multiplies bf16 bit patterns as integers, so it computes in fp32 throughout.
    """
    found = {tensor.dtype for tensor in tensors}
    if INTERPRET or len(found) > 1:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(found.pop(), tl.float32)


@functools.lru_cache(maxsize=4096)
def best_splits(programs: int, tiles: int, slots: int, most: int = 64) -> int:
    """Into how many parts to cut each program's `tiles` so that `slots` concurrent programs finish soonest.

    A part costs its tiles plus about two tiles of prologue, output and merge.
    """
    best, best_cost = 1, -(-programs // slots) * tiles
    for splits in range(2, min(most, tiles) + 1):
        cost = -(-programs * splits // slots) * (-(-tiles // splits) + 2)
        if cost < best_cost:
            best, best_cost = splits, cost
    return best
