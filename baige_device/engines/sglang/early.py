"""What must happen before SGLang is imported; called from `baige_device_sglang.pth` when `BAIGE_BACKEND=reference`.

SGLang's plugins are loaded after its modules, which import torchvision and triton at once. On a host without an
accelerator those two are either built for CUDA or absent. Two import finders mend that at the first import of either
package; until then they cost a failed string comparison an import. Imports no torch by itself.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SGLANG_STUBS", "install"]

SGLANG_STUBS = "_platform_stubs.py"
"""SGLang's own stand-in for the triton package (it ships it for Apple hosts)."""
_TORCHVISION_OPS = ("nms", "qnms")
_placed: set[type] = set()
"""Finders that have been put in place; each leaves by itself when its package is imported."""
_libraries: list[object] = []
"""Operator definitions live as long as their `torch.library.Library`."""


def install() -> None:
    """Put the finders in front of `sys.meta_path`, once per process."""
    for finder in (_TorchvisionFinder, _SglangFinder):
        if finder not in _placed:
            _placed.add(finder)
            sys.meta_path.insert(0, finder)


class _TorchvisionFinder:
    """Declares the operators that torchvision's fake kernels refer to when its native library cannot be loaded."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            spec = importlib.util.find_spec("torchvision")
            if spec is not None and spec.origin is not None:
                _declare_torchvision_ops(Path(spec.origin).parent)


class _SglangFinder:
    """Loads SGLang's triton stub when there is no triton."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name == "sglang":
            sys.meta_path.remove(cls)
            spec = importlib.util.find_spec("sglang")
            if importlib.util.find_spec("triton") is None and spec is not None and spec.origin is not None:
                _install_triton_stub(Path(spec.origin).with_name(SGLANG_STUBS))


def _declare_torchvision_ops(package: Path) -> None:
    import torch

    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for op in _TORCHVISION_OPS:
        fragment.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(fragment)


def _install_triton_stub(file: Path) -> None:
    """Run SGLang's installer as on the Apple host that it asks for; only its triton part is used."""
    import torch

    if not file.is_file():
        raise ImportError(
            f"sglang: {file} is missing, and no triton is installed; install triton, or a version of SGLang inside the "
            "window of baige-device"
        )
    spec = importlib.util.spec_from_file_location("_baige_sglang_stubs", file)
    assert spec is not None
    assert spec.loader is not None
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    # The module's own globals are set, not the real `sys` and `platform`: nobody else may see another host.
    stubs.sys = types.SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")
    stubs._patch_non_blocking = lambda: None
    mps: Any = torch.backends.mps
    real = mps.is_available
    mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        mps.is_available = real
