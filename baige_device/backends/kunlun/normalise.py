"""The vendor's calling convention in one place; the adapters go through these functions and nothing else repeats them.

Contiguous inputs, int32 indices, lengths as (host, device) pairs, outputs zero-filled by the caller, absmax instead of
scale, and an attention factor that the kernel divides by the root of the head size. A mistake here is an error at
best and silent garbage at worst, which is why the emulator's mutation test breaks each function in turn.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "INT8_MAX",
    "absmax_of_scale",
    "constant_pair",
    "dense",
    "filled_lse",
    "host_copy",
    "host_twins",
    "int32",
    "int64",
    "length_pair",
    "prefill_alpha",
    "scale_of_absmax",
    "zeros",
]

INT8_MAX = 127.0
_twins: list[tuple[Tensor, Tensor]] = []


@contextlib.contextmanager
def host_twins(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the block, `(device tensor, equal host tensor)` pairs spare the adapters their copy to the host.

    An engine knows its lengths on the host anyway. Without this every op that needs lengths synchronises once a call.
    """
    _twins.extend(pairs)
    try:
        yield
    finally:
        del _twins[len(_twins) - len(pairs) :]


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor's values on the host: the twin when the engine gave one, else a copy, which is a full device sync."""
    for device, host in _twins:
        if device is tensor:
            return host
    return tensor.cpu()


def length_pair(values: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 (host, device) copies of lengths or cumulative lengths that the host knows; no sync."""
    host = torch.tensor(values, dtype=torch.int32, device="cpu")
    return host, torch.tensor(values, dtype=torch.int32, device=device)


def constant_pair(count: int, value: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 `[count]` (host, device) tensors of one value; no copy and no sync."""
    host = torch.full((count,), value, dtype=torch.int32, device="cpu")
    return host, torch.full((count,), value, dtype=torch.int32, device=device)


def dense(tensor: Tensor) -> Tensor:
    """A contiguous tensor: the same one, or a copy."""
    return tensor.contiguous()


def int32(tensor: Tensor) -> Tensor:
    """Contiguous int32 indices. Callers guarantee that the values fit."""
    return tensor.to(torch.int32).contiguous()


def int64(tensor: Tensor) -> Tensor:
    """Contiguous int64 indices, for pointer tables and transfers."""
    return tensor.to(torch.int64).contiguous()


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output or workspace as kernels want it: they leave skipped rows as they are."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def filled_lse(tokens: int, heads: int, device: torch.device) -> Tensor:
    """fp32 `[tokens, heads]` LSE buffer, natural logarithm, -inf where nothing is written."""
    return torch.full((tokens, heads), -math.inf, dtype=torch.float32, device=device)


def absmax_of_scale(scale: Tensor) -> Tensor:
    """The vendor's absmax of a scale: `real = q * scale = q * absmax / 127`."""
    return scale * INT8_MAX


def scale_of_absmax(absmax: Tensor) -> Tensor:
    """The scale of a vendor's absmax."""
    return absmax / INT8_MAX


def prefill_alpha(scale: float, head_size: int) -> float:
    """`alpha` of `prefill_attention`, whose score is `q·k / sqrt(head_size) * alpha`."""
    return scale * math.sqrt(head_size)
