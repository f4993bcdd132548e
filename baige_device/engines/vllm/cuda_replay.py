"""Eager steps without Python: a layer's launches are made once and repeated while nothing about them changes.

With CUDA graphs the swap is captured and this is idle. Without, and behind a graph, where the host's connector calls
us, the host's tensors lie in the same buffers step after step, so that the kernels' parameters are the same as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from baige_device.backends.cuda.driver import Tape
from baige_device.backends.cuda.gather import uva_sparse_gather, uva_sparse_scatter
from baige_device.backends.cuda.resolve import hot_cache_resolve

__all__ = ["Repeated", "may_repeat"]

_OURS: dict[str, Callable[..., Any]] = {
    "hot_cache_resolve": hot_cache_resolve,
    "uva_sparse_gather": uva_sparse_gather,
    "uva_sparse_scatter": uva_sparse_scatter,
}
_MOST_SHARED_ENTRIES = 4096
"""Lists and hot buffers up to here are looked up in shared memory; longer ones need a workspace, which is temporary."""


def may_repeat(ops: Any, *names: str, entries: int = 0) -> bool:
    """Whether these ops are our kernels, called without checks, and take no temporary memory."""
    functions = [getattr(ops, name) for name in names]
    ours = all(getattr(f, "__wrapped__", None) is _OURS[name] for name, f in zip(names, functions, strict=True))
    return ours and not any(f.checked for f in functions) and entries <= _MOST_SHARED_ENTRIES


class Repeated:
    """One place in a step that makes `launches` launches."""

    def __init__(self, launches: int) -> None:
        self._launches = launches
        self._key: tuple[int, ...] | None = None
        self._tape = Tape()

    def __call__(self, key: tuple[int, ...], device: int, run: Callable[[], None]) -> None:
        """Run, or repeat the run before if its key, every address and stride that it depends on, was the same.

        The stream is added to the key. Calls of the ops are counted when they run, not when they are repeated.
        """
        key = (torch._C._cuda_getCurrentRawStream(device), *key)
        if self._key == key:
            self._tape.replay(device)
            return
        self._key = None
        with Tape() as tape:
            run()
        if len(tape) == self._launches:
            self._key, self._tape = key, tape
