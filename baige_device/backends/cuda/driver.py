"""The few calls of the CUDA driver that the backend makes itself: modules, launches, host registration, addresses."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from baige_device.backends.cuda.nvrtc import compile_source
from baige_device.errors import BackendError

__all__ = [
    "Kernel",
    "Tape",
    "advise_on_host",
    "alloc_managed",
    "context",
    "device_address",
    "free_managed",
    "kernel",
    "managed_is_concurrent",
    "map_managed",
    "max_shared_bytes",
    "prefetch_to_host",
    "register_host",
    "unregister_host",
]

_RELAXED_CAPTURE = 2
_MAX_DYNAMIC_SHARED = 8
_DEVICE_POINTER = 3
_PORTABLE_AND_MAPPED = 1 | 2
_ATTACH_GLOBAL = 1
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_HOST = -1
_MAX_SHARED_BYTES, _CONCURRENT_MANAGED_ACCESS = 97, 89


@functools.lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"cuda: the driver library cannot be loaded: {error}") from error
    library.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    library.cuMemAllocManaged.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemAdvise.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.cuMemPrefetchAsync.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    library.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return library


def _explain(status: int) -> str:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(status, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} (CUDA error {status})"


def _check(status: int, what: str) -> None:
    if status != 0:
        raise BackendError(f"cuda: {what}: {_explain(status)}")


@functools.lru_cache(maxsize=64)
def _primary_context(device: int) -> int:
    library, handle = _cuda(), ctypes.c_void_p()
    # Kept for the life of the process, as the CUDA runtime under torch keeps it.
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(handle), _number(device)), f"context of device {device}")
    assert handle.value is not None
    return handle.value


@contextmanager
def context(device: int) -> Iterator[None]:
    """Run with the primary context of the device, as torch uses it; costs about a microsecond when it is current."""
    wanted, current, library = _primary_context(device), ctypes.c_void_p(), _cuda()
    library.cuCtxGetCurrent(ctypes.byref(current))
    if current.value == wanted:
        yield
        return
    _check(library.cuCtxSetCurrent(ctypes.c_void_p(wanted)), f"context of device {device}")
    try:
        yield
    finally:
        library.cuCtxSetCurrent(current)


def device_address(host_address: int) -> int | None:
    """The device's address for an address in registered host memory, or None when it is not registered."""
    found = ctypes.c_uint64()
    status = _cuda().cuPointerGetAttribute(ctypes.byref(found), _DEVICE_POINTER, host_address)
    return found.value if status == 0 else None


def register_host(address: int, num_bytes: int) -> str:
    """Pin host memory and map it into the device's address space; returns the driver's complaint, or an empty text."""
    status = _cuda().cuMemHostRegister_v2(address, num_bytes, _PORTABLE_AND_MAPPED)
    return "" if status == 0 else _explain(status)


def unregister_host(address: int) -> str:
    """Undo `register_host`; returns the driver's complaint, or an empty text."""
    status = _cuda().cuMemHostUnregister(address)
    return "" if status == 0 else _explain(status)


def alloc_managed(num_bytes: int) -> int:
    """Address of managed memory that every stream may use; no page of it is anywhere yet."""
    found = ctypes.c_uint64()
    _check(_cuda().cuMemAllocManaged(ctypes.byref(found), num_bytes, _ATTACH_GLOBAL), f"{num_bytes} managed bytes")
    return found.value


def advise_on_host(address: int, num_bytes: int) -> None:
    """Keep managed memory on the host: a device that reads it maps it, and no page moves."""
    _check(_cuda().cuMemAdvise(address, num_bytes, _PREFERRED_LOCATION, _HOST), "managed memory on the host")


def map_managed(address: int, num_bytes: int, device: int) -> None:
    """Map managed memory for a device now, so that no access of it faults."""
    number = _number(device)
    _check(_cuda().cuMemAdvise(address, num_bytes, _ACCESSED_BY, number), "mapping managed memory for the device")


def prefetch_to_host(address: int, num_bytes: int) -> None:
    """Bring the pages of managed memory in on the host; waits."""
    _check(_cuda().cuMemPrefetchAsync(address, num_bytes, _HOST, None), "pages of managed memory")
    _check(_cuda().cuStreamSynchronize(None), "pages of managed memory")


def free_managed(address: int) -> None:
    """Free managed memory; waits for the device."""
    _check(_cuda().cuMemFree_v2(address), "freeing managed memory")


def managed_is_concurrent(device: int) -> bool:
    """Whether host and device may use managed memory at the same time; without that no page could stay on the host."""
    return _device_attribute(device, _CONCURRENT_MANAGED_ACCESS) == 1


def max_shared_bytes(device: int) -> int:
    """Shared memory that a block may ask for at most."""
    return _device_attribute(device, _MAX_SHARED_BYTES)


@functools.lru_cache(maxsize=64)
def _device_attribute(device: int, attribute: int) -> int:
    found = ctypes.c_int()
    _check(_cuda().cuDeviceGetAttribute(ctypes.byref(found), attribute, _number(device)), f"attribute {attribute}")
    return found.value


def _number(device: int) -> int:
    """The driver's handle of a device."""
    torch.cuda.init()
    number = ctypes.c_int()
    _check(_cuda().cuDeviceGet(ctypes.byref(number), device), f"device {device}")
    return number.value


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_CLUSTER = 4
_MOST_CONFIGS = 256
_SERIAL_BUT_EARLY = _Attribute(6, 0, 1)
"""Programmatic stream serialisation: the blocks are placed while the kernel before still runs. Kernels launched so
begin with `griddepcontrol.wait`, which waits until all of that kernel's writes can be seen."""


class _Recorder(threading.local):
    tape: Tape | None = None


_recorder = _Recorder()


class Tape:
    """The launches made inside a `with` of it, to be queued again: a graph without a graph, for eager steps.

    A replay costs about two microseconds a kernel, since nothing is looked at: it is right while every address, shape
    and stream is what it was. Only launches of this module are on it, and no memory is kept alive by it.
    """

    def __init__(self) -> None:
        self._launches: list[tuple[Callable[[], int], ctypes.Structure]] = []
        self._before: Tape | None = None

    def __enter__(self) -> Tape:
        self._before = _recorder.tape
        _recorder.tape = self
        return self

    def __exit__(self, *error: object) -> None:
        _recorder.tape = self._before

    def __len__(self) -> int:
        return len(self._launches)

    def append(self, launch: Callable[[], int], parameters: ctypes.Structure) -> None:
        """Note a launch that was made, and the struct that it reads."""
        self._launches.append((launch, parameters))

    def replay(self, device: int) -> None:
        """Queue them again on the streams that they went to."""
        with context(device):
            for launch, _ in self._launches:
                status = launch()
                if status != 0:
                    raise BackendError(f"cuda: launch: {_explain(status)}")


class Kernel:
    """A loaded kernel whose only parameter is one struct."""

    def __init__(self, function: ctypes.c_void_p, module: ctypes.c_void_p, early: bool) -> None:
        self._function = function
        self._module = module
        self._early = early
        self._launch = _cuda().cuLaunchKernelEx if early else _cuda().cuLaunchKernel
        self._shared_bytes = 0
        self._configs: dict[tuple[int, int, int, int, bool], Any] = {}

    def allow_shared(self, num_bytes: int) -> None:
        """Raise the limit of dynamic shared memory to at least `num_bytes`."""
        if num_bytes > self._shared_bytes:
            status = _cuda().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, ctypes.c_int(num_bytes))
            _check(status, f"{num_bytes} bytes of shared memory")
            self._shared_bytes = num_bytes

    def launch(
        self,
        grid: int,
        block: int,
        stream: int,
        parameters: ctypes.Structure,
        shared_bytes: int = 0,
        *,
        one_cluster: bool = False,
    ) -> None:
        """Queue the kernel on a raw stream of the current context.

        `one_cluster` puts all blocks, at most eight, into one graphics processing cluster from compute capability 9.0.
        """
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        if self._early:
            config = self._config(grid, block, shared_bytes, stream, one_cluster)
            arguments: tuple[Any, ...] = (config, self._function, pointers, None)
        else:
            arguments = (self._function, grid, 1, 1, block, 1, 1, shared_bytes, stream, pointers, None)
        status = self._launch(*arguments)
        if status != 0:
            raise BackendError(f"cuda: launch: {_explain(status)}")
        if _recorder.tape is not None:
            _recorder.tape.append(functools.partial(self._launch, *arguments), parameters)

    def _config(self, grid: int, block: int, shared_bytes: int, stream: int, one_cluster: bool) -> Any:
        """What stays the same from launch to launch; never written again, so threads may share it."""
        key = (grid, block, shared_bytes, stream, one_cluster)
        found = self._configs.get(key)
        if found is None:
            attributes = (_Attribute * 2)(_SERIAL_BUT_EARLY)
            if one_cluster:
                attributes[1] = _Attribute(_CLUSTER, 0, grid, (ctypes.c_int * 15)(1, 1))
            count = 2 if one_cluster else 1
            config = _Launch((grid, 1, 1), (block, 1, 1), shared_bytes, stream, attributes, count)
            if len(self._configs) >= _MOST_CONFIGS:
                self._configs.clear()
            found = self._configs[key] = ctypes.byref(config)
        return found


def kernel(device: int, source: str, name: str, macros: Mapping[str, str | int]) -> Kernel:
    """The kernel `name` of `csrc/<source>` compiled with these macros for the device; built once a process."""
    return _kernel(device, source, name, tuple(sorted(macros.items())))


@functools.lru_cache(maxsize=256)
def _kernel(device: int, source: str, name: str, macros: tuple[tuple[str, str | int], ...]) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_source(source, f"sm_{major}{minor}", dict(macros))
    library, module, function = _cuda(), ctypes.c_void_p(), ctypes.c_void_p()
    with context(device), _relaxed_capture():
        _check(library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {source}")
        _check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"{source}: {name}")
    return Kernel(function, module, early=major >= 9)


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let a kernel be loaded while this thread captures a graph; loading touches no captured work."""
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    _check(_cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "capture mode")
    try:
        yield
    finally:
        _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
