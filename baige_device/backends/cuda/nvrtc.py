"""Run-time compilation of the CUDA C++ sources in `csrc/` with NVRTC, cached on disk.

NVRTC is called through ctypes: torch already ships the library that fits its CUDA version, so no compiler, no header
and no further package is needed on the user's machine, and any torch since 2.5 will do.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from baige_device.cache_root import cache_root
from baige_device.errors import BackendError
from baige_device.registry.offers import Verdict

__all__ = ["available", "compile_source", "find_library", "read_source"]

logger = logging.getLogger("baige_device")

_MAJORS = ("13", "12")


def read_source(name: str) -> str:
    """The text of one file of `csrc/`."""
    return (Path(__file__).parent / "csrc" / name).read_text(encoding="utf-8")


def available() -> Verdict:
    """Whether an NVRTC library was found; loads nothing."""
    path = find_library()
    if path is None:
        return Verdict.no("no libnvrtc found: expected torch's own (nvidia-cuda-nvrtc wheel) or a CUDA toolkit")
    return Verdict.yes(path)


def compile_source(name: str, architecture: str, macros: Mapping[str, str | int]) -> bytes:
    """Compile `csrc/<name>` for e.g. `sm_90` and return the cubin; from the disk cache when it is there.

    Raises:
        BackendError: NVRTC is missing or rejects the source; carries the compiler's log.
    """
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in sorted(macros.items())]
    source = read_source(name)
    path = find_library()
    if path is None:
        raise BackendError(f"cuda: {name}: {available().reason}")
    key = hashlib.sha256("\0".join([source, *options, os.path.realpath(path)]).encode()).hexdigest()
    folder = _cache_folder()
    cached = folder / f"{name.removesuffix('.cu')}-{key[:32]}.cubin" if folder else None
    found = _read_cached(cached) if cached else None
    if found is None:
        found = _compile(_library(path), name, source, options)
        if cached:
            _write_cached(cached, found)
    return found


@functools.lru_cache(maxsize=1)
def find_library() -> str | None:
    """Path of the NVRTC library that fits the installed torch best: its own wheel's first, then a toolkit's."""
    for candidate in _candidates():
        if os.path.exists(candidate):
            return candidate
    return None


def _candidates() -> Iterator[str]:
    roots: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    if spec is not None and spec.submodule_search_locations is not None:
        roots += [os.path.join(root, "*", "lib") for root in spec.submodule_search_locations]
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is not None and torch_spec.origin is not None:
        roots.append(os.path.join(os.path.dirname(torch_spec.origin), "lib"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            roots.append(os.path.join(os.environ[variable], "lib64"))
    roots += ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
    for root in roots:
        for major in _MAJORS:
            yield from sorted(glob.glob(os.path.join(root, f"libnvrtc.so.{major}*")))
        # torch's own non-wheel builds carry a hashed file name
        yield from sorted(glob.glob(os.path.join(root, "libnvrtc-*.so.1[23]*")))


@functools.lru_cache(maxsize=1)
def _library(path: str) -> ctypes.CDLL:
    try:
        # The wheels' library looks its built-ins up by name alone, so they have to be loaded before it asks.
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
            ctypes.CDLL(builtins)
        return ctypes.CDLL(path)
    except OSError as error:
        raise BackendError(f"cuda: {path} cannot be loaded: {error}") from error


def _compile(library: ctypes.CDLL, name: str, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if library.nvrtcCompileProgram(program, len(options), arguments) != 0:
            raise BackendError(f"cuda: {name} does not compile with {' '.join(options)}: {_log(library, program)}")
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(library, library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(library, library.nvrtcGetProgramLog(program, text))
    return text.value.decode(errors="replace")


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BackendError(f"cuda: NVRTC fails: {library.nvrtcGetErrorString(status).decode()}")


def _cache_folder() -> Path | None:
    """Where kernels are kept, or None for a user without a home directory (containers with an arbitrary uid)."""
    try:
        return cache_root() / "cuda"
    except RuntimeError as error:
        # No folder in /tmp instead: who foresees its name could leave kernels there for others to run.
        _log_once(f"{error} Each process compiles them anew, a second a kernel; set BAIGE_CACHE or HOME")
        return None


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning("cuda: compiled kernels are not kept: %s", reason)


def _read_cached(path: Path) -> bytes | None:
    """The cached cubin, or None; a torn or altered file counts as absent."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:32], data[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write_cached(path: Path, cubin: bytes) -> None:
    """Best effort: a read-only home directory costs a compilation a process and a line in the log, not the start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError as error:
        _log_once(f"{path.parent}: {error.strerror}. Each process compiles them anew; set BAIGE_CACHE")
