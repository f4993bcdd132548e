"""Rules of the chip that hold for all torch code around the kernels, for the time of a `with chip_rules():` block.

Fresh memory is poison, float8 cannot be cast or copied, reads of device values are counted, and under `capture=True`
they and data-dependent shapes raise. Host tensors are those made with `device="cpu"` or copied by `.cpu()`, and what is
computed from them alone; everything else stands for device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from kunlun_emulator.checks import _HOST_MARK, on_host
from kunlun_emulator.state import STATE, CaptureViolation, ChipError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["chip_rules"]

_FLOAT8 = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
_FRESH = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_DATA_SHAPED = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount"}
_READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
"""By name, since `torch_xmlir` replaces `Tensor.cpu`."""


class _Memory(TorchDispatchMode):
    """Poison, float8 and data-dependent shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtypes = {tensor.dtype for tensor in tensors} | {(kwargs or {}).get("dtype")}
        if name in ("aten::_to_copy", "aten::copy_", "aten::clone") and dtypes & _FLOAT8:
            raise ChipError(f"{name} has no kernel for float8")
        if name == "aten::mm" and "dtype" in func._overloadname:
            raise ChipError("aten::mm.dtype is not implemented")
        if STATE.capturing and (name in _DATA_SHAPED or _masks(name, args)):
            raise CaptureViolation(f"{name}: a shape depends on data inside a capture")
        result = func(*args, **(kwargs or {}))
        return _poison(result) if name in _FRESH else result


def _masks(name: str, args: Any) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_"):
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _poison(tensor: Tensor) -> Tensor:
    if tensor.dtype in _FLOAT8:
        return tensor
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max - 6)


class _Places(TorchFunctionMode):
    """Which tensors live on the host, and reads of those that do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = bool(tensors) and all(on_host(tensor) for tensor in tensors)
        name = getattr(func, "__name__", "")
        if name in _READS and tensors and not host:
            if STATE.capturing:
                raise CaptureViolation(f"{name} reads the device inside a capture")
            STATE.syncs += 1
        result = func(*args, **kwargs)
        if name == "cpu":
            host = True
        elif name == "to" and host and any(isinstance(arg, torch.device) for arg in args):
            host, result = False, result.clone()
        elif not tensors:
            host = kwargs.get("device") == "cpu"
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not any(leaf is tensor for tensor in tensors):
                setattr(leaf, _HOST_MARK, host)
        return result


@contextlib.contextmanager
def chip_rules(*, capture: bool = False) -> Iterator[None]:
    """Hold torch code in the block to the chip's rules. `STATE.syncs` counts reads of device values."""
    before = STATE.capturing, STATE.tracking
    STATE.capturing, STATE.tracking = capture, True
    try:
        with _Memory(), _Places():
            yield
    finally:
        STATE.capturing, STATE.tracking = before
