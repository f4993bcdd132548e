"""Reference of `uva_sparse_scatter`: plain torch."""

from __future__ import annotations

from torch import Tensor

from baige_device.ops.uva_sparse_gather.reference import copy_rows, live_entries

__all__ = ["uva_sparse_scatter"]


def uva_sparse_scatter(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor,
    dst_rows: Tensor,
    count: Tensor | None = None,
    *,
    max_sms: int = 0,
) -> None:
    """See the contract."""
    sources, targets = live_entries(src_rows, dst_rows, count)
    named = sources >= 0
    copy_rows(src, dst, sources[named], targets[named])
