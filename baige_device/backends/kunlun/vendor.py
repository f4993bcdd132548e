"""The vendor's Python modules: loaded on first use, asked for single ops by name, never by version.

Version numbers of the vendor's wheels say little (a recent `kunlun_ops` calls itself 0.0.1), so each op is looked up
by name. Nothing here runs at import of the backend, and nothing uses `torch.ops._C`, which belongs to other plugins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from baige_device.errors import BackendError
from baige_device.registry.offers import Verdict

__all__ = [
    "VendorLibraryError",
    "deep_ep_buffer",
    "forget",
    "has",
    "host_runtime",
    "kernel_module",
    "load_torch_xmlir",
    "require",
    "speed_ops",
]

_KERNELS = "kunlun_ops"
_OLD_KERNELS = "xtorch_ops"
_SPEED = "xspeedgate_ops"
_EXCHANGE = "deep_ep"


class VendorLibraryError(BackendError):
    """A vendor module is installed and its native library does not load."""


def load_torch_xmlir() -> ModuleType:
    """`torch_xmlir`, the module that turns `cuda` tensors into Kunlun tensors.

    Raises:
        ModuleNotFoundError: it is not installed. VendorLibraryError: it is and does not load.
    """
    return _load("torch_xmlir")


@functools.cache
def kernel_module() -> ModuleType:
    """`kunlun_ops`, or `xtorch_ops` as it was called before vLLM-Kunlun 0.11.

    Raises:
        ModuleNotFoundError, VendorLibraryError: as `load_torch_xmlir`.
    """
    try:
        return _load(_KERNELS)
    except ModuleNotFoundError as missing:
        try:
            return _load(_OLD_KERNELS)
        except ModuleNotFoundError:
            raise missing from None


@functools.cache
def speed_ops() -> Any:
    """The op namespace `torch.ops.xspeedgate_ops`, registered by importing `xspeedgate_ops`.

    Raises:
        ModuleNotFoundError, VendorLibraryError: as `load_torch_xmlir`.
    """
    _load(_SPEED)
    return torch.ops.xspeedgate_ops


@functools.cache
def deep_ep_buffer() -> Any:
    """The class `deep_ep.buffer_v2.BufferV2` of the vendor's DeepEP port, or None in a `deep_ep` without it.

    Raises:
        ModuleNotFoundError, VendorLibraryError: as `load_torch_xmlir`.
    """
    _load(_EXCHANGE)
    return getattr(_load(f"{_EXCHANGE}.buffer_v2"), "BufferV2", None)


def forget() -> None:
    """Drop the cached modules (tests, and `doctor` after an installation)."""
    kernel_module.cache_clear()
    speed_ops.cache_clear()
    deep_ep_buffer.cache_clear()
    _namespace.cache_clear()


def has(name: str) -> bool:
    """Whether `kunlun_ops.X`, `xspeedgate_ops.X` or `deep_ep.X` (a member of its buffer class) exists.

    False as well when the module is not installed.

    Raises:
        VendorLibraryError: the module is there and does not load.
    """
    module, _, op = name.partition(".")
    namespace = _namespace(module)
    return namespace is not None and hasattr(namespace, op)


@functools.cache
def _namespace(module: str) -> Any:
    """The module's ops, or None when it is not installed."""
    try:
        return {_KERNELS: kernel_module, _SPEED: speed_ops, _EXCHANGE: deep_ep_buffer}[module]()
    except ModuleNotFoundError:
        return None


def require(names: Iterable[str]) -> Verdict:
    """Yes when all the named ops exist; else a refusal that lists the missing ones."""
    missing = [name for name in names if not has(name)]
    if not missing:
        return Verdict.yes()
    return Verdict.no(f"the installed vendor build lacks {', '.join(missing)}")


def host_runtime() -> Any:
    """The runtime API with `cudaHostRegister`, which torch_xmlir maps onto its own runtime."""
    return torch.cuda.cudart()


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise
        raise VendorLibraryError(f"{name}: its import needs module {error.name!r}, which is missing") from error
    except (ImportError, OSError) as error:
        raise VendorLibraryError(_explain(name, str(error))) from error


def _explain(name: str, message: str) -> str:
    found = f"found torch {torch.__version__}, Python {platform.python_version()}"
    match = re.search(r"(?P<library>\S+?): undefined symbol: (?P<symbol>\S+)", message)
    if match is None:
        return f"{name}: its native library does not load: {message}; built for {_built_for(name)}; {found}"
    return (
        f"{name}: library {match['library']}: undefined symbol {match['symbol']}; built for {_built_for(name)}; "
        f"{found}; install the vendor wheels that belong to this torch"
    )


def _built_for(name: str) -> str:
    """What the wheel's metadata says: the torch it requires, a `torch29`-like version tag, and its Python tag."""
    try:
        wheel = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return "an unknown torch (the module has no package metadata)"
    parts = []
    pins = [line for line in wheel.requires or () if re.match(r"torch\b", line)]
    tag = re.search(r"torch(\d)\.?(\d+)", wheel.version)
    if pins:
        parts.append(pins[0])
    elif tag:
        parts.append(f"torch {tag[1]}.{tag[2]}")
    python = re.search(r"^Tag: (cp\d+)", wheel.read_text("WHEEL") or "", re.MULTILINE)
    if python:
        parts.append(python[1])
    return f"{', '.join(parts) or 'an unstated torch'} ({name} {wheel.version})"
