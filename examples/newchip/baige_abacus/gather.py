"""`uva_sparse_gather` on the abacus chip: words by DMA on the transfer stream, the tail of a row by the cores."""

from __future__ import annotations

import torch

from baige_abacus.runtime import WORD_BYTES, dma, stream


def uva_sparse_gather(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_rows: torch.Tensor,
    dst_rows: torch.Tensor,
    count: torch.Tensor | None = None,
    *,
    dst_offsets: torch.Tensor | None = None,
    max_sms: int = 0,
) -> None:
    """Copy host rows to device rows, as the contract says. The DMA engine copies, so `max_sms` has no meaning."""
    if dst_offsets is not None:
        offsets = dst_offsets.long() if dst_rows.dim() == 1 else dst_offsets.long()[:, None]
        dst_rows = torch.where(dst_rows < 0, -1, dst_rows + offsets)
    moved = stream("transfer").submit(lambda: _copy(src, dst, *_plan(src_rows, dst_rows, count)))
    stream("compute").submit(lambda: None, after=moved).result()


def _plan(
    src_rows: torch.Tensor, dst_rows: torch.Tensor, count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The live entries; runs on the chip, where the count lives."""
    live = dst_rows >= 0
    if count is not None:
        live &= torch.arange(src_rows.shape[-1]) < (count if src_rows.dim() == 1 else count[:, None])
    return src_rows[live].long(), dst_rows[live].long()


def _copy(src: torch.Tensor, dst: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
    source, target = _pages(src), _pages(dst)
    whole = source.shape[2] - source.shape[2] % WORD_BYTES
    empty = src_rows < 0
    _store(target, dst_rows[empty], torch.zeros(1, dtype=torch.uint8))
    src_rows, dst_rows = src_rows[~empty], dst_rows[~empty]
    if src_rows.numel():
        dma(source[..., :whole], target[..., :whole], src_rows, dst_rows)
        tail = source[src_rows // source.shape[1], src_rows % source.shape[1], whole:]
        _store(target[..., whole:], dst_rows, tail)


def _store(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    if rows.numel():
        pool[rows // pool.shape[1], rows % pool.shape[1]] = values


def _pages(pool: torch.Tensor) -> torch.Tensor:
    """The pool as bytes `[P, N, W]`; a view."""
    return (pool[None] if pool.dim() == 2 else pool).view(torch.uint8)
