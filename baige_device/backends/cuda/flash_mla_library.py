"""FlashMLA's sparse kernels behind one interface, from whichever package is there.

`sgl-flash-mla` installs the package `flash_mla`. A host engine may have loaded its own build: vLLM registers it as
`torch.ops._flashmla_C`. Only what is loaded or installed already is used; nothing is imported from an engine.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["FlashMla", "find_flash_mla"]

_NAMESPACE = "_flashmla_C"


class FlashMla(Protocol):
    """The two kernels. LSE of a query without rows is +inf."""

    name: str

    def schedule(self) -> Any:
        """An empty split plan; the first `decode` with it fills it in, for its shapes."""

    def decode(self, q: Tensor, pages: Tensor, indices: Tensor, scale: float, schedule: Any) -> tuple[Tensor, Tensor]:
        """q `[T, 1, H, 576]` over pages `[P, 64, 1, 656]` at int32 `[T, 1, K]`, -1 masked.

        Returns out `[T, 1, H, 512]` and lse `[T, H, 1]`.
        """

    def prefill(
        self, q: Tensor, rows: Tensor, indices: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q `[T, H, 576]` over bf16 rows `[S, 1, 576]` at int32 `[T, 1, K]`: out `[T, H, 512]`, lse `[T, H]`.

        A dense `out` may be written in place; the caller looks at what it gets.
        """


@dataclass
class _Package:
    """The package `flash_mla`."""

    name = "flash_mla"

    def schedule(self) -> Any:
        from flash_mla import get_mla_metadata

        return get_mla_metadata()[0]

    def decode(self, q: Tensor, pages: Tensor, indices: Tensor, scale: float, schedule: Any) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_with_kvcache

        out, lse = flash_mla_with_kvcache(
            q,
            pages,
            None,
            None,
            512,
            schedule,
            None,
            scale,
            False,
            True,
            indices,
            use_legacy=True,
        )
        return out, lse

    def prefill(
        self, q: Tensor, rows: Tensor, indices: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from flash_mla import flash_mla_sparse_fwd

        out, _, lse = flash_mla_sparse_fwd(q, rows, indices, scale, use_legacy=True)
        return out, lse


class _Plan:
    """The two tensors that the kernel makes on first use of a shape."""

    def __init__(self) -> None:
        self.tile_scheduler_metadata: Tensor | None = None
        self.num_splits: Tensor | None = None


@dataclass
class _HostOps:
    """The ops that the host engine has registered."""

    name = f"torch.ops.{_NAMESPACE}"

    def schedule(self) -> Any:
        return _Plan()

    def decode(self, q: Tensor, pages: Tensor, indices: Tensor, scale: float, schedule: Any) -> tuple[Tensor, Tensor]:
        out, lse, schedule.tile_scheduler_metadata, schedule.num_splits = torch.ops._flashmla_C.sparse_decode_fwd(
            q,
            pages,
            indices,
            None,  # lengths of the lists: its kernel for 656-byte rows refuses them
            None,
            schedule.tile_scheduler_metadata,
            schedule.num_splits,
            None,
            None,
            None,
            512,
            scale,
        )
        return out, lse

    def prefill(
        self, q: Tensor, rows: Tensor, indices: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        target = out if out is not None and out.is_contiguous() else None
        result, _, lse = torch.ops._flashmla_C.sparse_prefill_fwd(q, rows, indices, scale, 512, None, None, target)
        return result, lse


def find_flash_mla() -> FlashMla | None:
    """The host engine's build when it is loaded, else the installed package, else None."""
    if hasattr(torch.ops._flashmla_C, "sparse_decode_fwd"):
        return _HostOps()
    return _package()


@functools.lru_cache(maxsize=1)
def _package() -> FlashMla | None:
    return _Package() if importlib.util.find_spec("flash_mla") is not None else None
