"""The documented preconditions, as errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from kunlun_emulator.state import STATE, ChipError
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["contiguous", "dtype", "expect", "host_device_pair", "kernel", "on_host", "shape"]

_HOST_MARK = "_kunlun_emulator_host"


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the call, and run the body outside of the chip's rules, which are for its callers."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        STATE.calls[function.__name__] = STATE.calls.get(function.__name__, 0) + 1
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def expect(condition: bool, op: str, what: str) -> None:
    if not condition:
        raise ChipError(f"Check 0 == ret failed, left operand=1, {op} failed: {what}")


def contiguous(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        expect(tensor is None or tensor.is_contiguous(), op, f"{name} is not contiguous")


def dtype(op: str, wanted: torch.dtype | tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    allowed = wanted if isinstance(wanted, tuple) else (wanted,)
    for name, tensor in tensors.items():
        expect(
            tensor is None or tensor.dtype in allowed, op, f"{name}: {getattr(tensor, 'dtype', None)}, not {allowed}"
        )


def shape(op: str, name: str, tensor: Tensor, *wanted: int) -> None:
    fits = tensor.dim() == len(wanted) and all(w in (-1, h) for w, h in zip(wanted, tensor.shape, strict=True))
    expect(fits, op, f"{name} is {list(tensor.shape)}, not {list(wanted)}")


def on_host(tensor: Tensor) -> bool:
    return bool(getattr(tensor, _HOST_MARK, False))


def host_device_pair(op: str, name: str, host: Tensor | None, device: Tensor | None, size: int) -> list[int]:
    """Both copies there, int32, equal, and two tensors: one in each memory. Returns the values."""
    expect(host is not None and device is not None, op, f"{name}: both the cpu and the xpu copy are needed")
    assert host is not None
    assert device is not None
    dtype(op, torch.int32, **{f"{name}_cpu": host, f"{name}_xpu": device})
    shape(op, f"{name}_cpu", host, size)
    shape(op, f"{name}_xpu", device, size)
    expect(host.data_ptr() != device.data_ptr() or size == 0, op, f"{name}_cpu is device memory")
    expect(on_host(host) or not STATE.tracking, op, f"{name}_cpu is device memory")
    expect(not on_host(device), op, f"{name}_xpu is host memory")
    expect(torch.equal(host, device), op, f"{name}_cpu and {name}_xpu differ")
    values: list[int] = host.tolist()
    return values
