"""Name and compute capability of the first visible GPU, asked of NVML: no CUDA context, so forking stays safe."""

from __future__ import annotations

import ctypes
import os

__all__ = ["first_gpu"]


def first_gpu() -> tuple[str, tuple[int, int]] | None:
    """(name, compute capability) of the first GPU that this process may use, or None where NVML cannot say."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        return _describe(library)
    finally:
        library.nvmlShutdown()


def _describe(library: ctypes.CDLL) -> tuple[str, tuple[int, int]] | None:
    handle = ctypes.c_void_p()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    if first.isdigit():
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(handle))
    else:
        status = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    if status != 0:
        return None
    name = ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)) != 0:
        return None
    if library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    return name.value.decode(), (major.value, minor.value)
