"""What importing `torch_xmlir` changes in torch: the runtime API, copies to the host, and the collectives' dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from kunlun_emulator.state import STATE, ChipError
from torch import Tensor

__all__ = ["apply", "undo"]

_undo: list[Callable[[], None]] = []
_FLOAT8 = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
_MOVING = ("all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast")
_REDUCING = ("all_reduce", "reduce_scatter_tensor")


def apply() -> None:
    """Idempotent."""
    if _undo:
        return
    _replace(torch.cuda, "cudart", lambda: _RUNTIME)
    _replace(Tensor, "cpu", _copy_to_host)
    for name in _MOVING:
        _replace(dist, name, _checked(getattr(dist, name), _FLOAT8, "has no such type"))
    for name in _REDUCING:
        _replace(dist, name, _checked(getattr(dist, name), _FLOAT8 | {torch.int8}, "would add it as another type"))
    if STATE.profile.group_backend:
        _replace(dist, "get_backend", lambda group=None: STATE.profile.group_backend)
        _replace(dist, "all_to_all_single", _no_all_to_all)


def undo() -> None:
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, new: Any) -> None:
    own = name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old) if own else delattr(owner, name))


_cpu = Tensor.cpu


@functools.wraps(_cpu)
def _copy_to_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A copy, as from a device, so that host and device copies are never one tensor."""
    result = _cpu(tensor, *args, **kwargs)
    return result.clone() if result.data_ptr() == tensor.data_ptr() else result


def _checked(function: Callable[..., Any], refused: set[torch.dtype], why: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        flat = [item for arg in (*args, *kwargs.values()) for item in (arg if isinstance(arg, list) else [arg])]
        for item in flat:
            if isinstance(item, Tensor) and item.dtype in refused:
                raise ChipError(f"{function.__name__}: {item.dtype}: BKCL {why}")
        return function(*args, **kwargs)

    return collective


def _no_all_to_all(*args: Any, **kwargs: Any) -> None:
    raise ChipError(f"Backend {STATE.profile.group_backend} does not support alltoall_base")


def _register(address: int, num_bytes: int, flags: int) -> int:
    """The runtime's status, 0 for success. sglang-kunlun aligns start and length to 2 MiB before it registers."""
    if STATE.profile.register_status:
        return STATE.profile.register_status
    if address % (1 << 21) or num_bytes % (1 << 21):
        return 1
    STATE.registered[address] = num_bytes
    return 0


def _unregister(address: int) -> int:
    return 0 if STATE.registered.pop(address, None) is not None else 1


_RUNTIME = SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister)
