"""Ragged batches over paged caches: block tables, hostile page contents and every accepted cache layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baige_device.testing.lab import GUARD, Lab

__all__ = ["CACHE_LAYOUTS", "Batch", "batch_tensors", "fill_live", "paged_cache"]

CACHE_LAYOUTS = ("contiguous", "page-gap", "interleaved", "heads-first", "offset-1", "absurd-head-stride")
ABSURD = 999_999_937
"""Stride of a dimension of size 1: legal, meaningless, and found in real caches. Nothing may be computed from it."""
SPARE_PAGES = 2
"""Pages of storage behind the cache, full of NaN: block-table entries past a request's length point there."""
FOREIGN = 300.0
"""What tokens outside a sliding window hold."""


@dataclass(frozen=True)
class Batch:
    """(query tokens, sequence tokens) of each request, and query rows behind the last one (graph padding)."""

    lens: Sequence[tuple[int, int]]
    padding_rows: int = 0

    @property
    def queries(self) -> int:
        return sum(queries for queries, _ in self.lens) + self.padding_rows

    @property
    def longest_query(self) -> int:
        return max((queries for queries, _ in self.lens), default=0)

    @property
    def longest_sequence(self) -> int:
        return max((length for _, length in self.lens), default=0)


def batch_tensors(
    lab: Lab, batch: Batch, page: int, dtype: torch.dtype, spare_columns: int = 2
) -> tuple[dict[str, Tensor], int]:
    """block_table, q_starts and seq_lens for the batch, and the number of pages of the cache.

    Pages are shuffled over the whole cache, with unused ones between; table entries past the length point behind it.
    Replays of a graph get shorter sequences in tensors of the same shapes.
    """
    columns = max((-(-length // page) for _, length in batch.lens), default=0) + spare_columns
    pages = sum(-(-length // page) for _, length in batch.lens) + 3
    lens = [_shorter(lab, queries, length) if lab.forked else length for queries, length in batch.lens]
    blocks = [-(-length // page) for length in lens]
    order = lab.permutation(pages).tolist()
    table = []
    for count in blocks:
        mine, order = order[:count], order[count:]
        table.append(mine + [pages + column % SPARE_PAGES for column in range(columns - count)])
    starts = [0]
    for queries, _ in batch.lens:
        starts.append(starts[-1] + queries)
    tensors = {
        "block_table": lab.tensor(table, dtype).view(len(blocks), columns),
        "q_starts": lab.tensor(starts, dtype),
        "seq_lens": lab.tensor(lens, dtype),
    }
    return tensors, pages


def _shorter(lab: Lab, queries: int, length: int) -> int:
    return lab.random.randint(max(queries, 1), length) if length else 0


def paged_cache(
    lab: Lab, pages: int, page: int, inner: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous"
) -> Tensor:
    """A guarded cache `[P, N, *inner]` full of NaN (fp8: NaN codes, int8: 127), in one of `CACHE_LAYOUTS`."""
    spare = pages + SPARE_PAGES
    if layout == "heads-first" and len(inner) == 2:
        groups, width = inner
        base = _poisoned(lab, spare * groups * page * width, dtype, 0)
        return base.view(spare, groups, page, width).transpose(1, 2)[:pages]
    size = page * math.prod(inner)
    stride = size + 5 if layout == "page-gap" else 2 * size if layout == "interleaved" else size
    base = _poisoned(lab, spare * stride, dtype, 1 if layout == "offset-1" else 0)
    inner_strides = [math.prod(inner[dim + 1 :]) for dim in range(len(inner))]
    if layout == "absurd-head-stride" and inner[0] == 1:
        inner_strides[0] = ABSURD
    return base.as_strided((pages, page, *inner), (stride, math.prod(inner), *inner_strides), base.storage_offset())


def _poisoned(lab: Lab, count: int, dtype: torch.dtype, offset: int) -> Tensor:
    total = count + 2 * GUARD + offset
    if dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        base = torch.full((total,), 0x7F, dtype=torch.uint8, device=lab.device).view(dtype)
    else:
        base = torch.full((total,), math.nan, dtype=dtype, device=lab.device)
    return base[GUARD + offset : GUARD + offset + count]


def fill_live(lab: Lab, cache: Tensor, tensors: dict[str, Tensor], page: int, dead_below: Sequence[int] = ()) -> None:
    """Give every live token of every request random values; all else keeps its NaN.

    `dead_below[b]` tokens at the start of request b, outside every query's sliding window, get a large finite value:
    in an engine they hold some other request's data, so a kernel may load them but must not weigh them.
    """
    table, lens = tensors["block_table"].tolist(), tensors["seq_lens"].tolist()
    for row, length in enumerate(lens):
        first = dead_below[row] if dead_below else 0
        for token in range(length):
            target = cache[table[row][token // page], token % page]
            target.copy_(_values(lab, target) if token >= first else torch.full_like(target, FOREIGN))


def _values(lab: Lab, target: Tensor) -> Tensor:
    if target.dtype == torch.int8:
        return lab.integers(-127, 128, *target.shape, dtype=torch.int8)
    if target.dtype == torch.float8_e4m3fn:
        return lab.normal(*target.shape, dtype=torch.float32).to(torch.float8_e4m3fn)
    return lab.normal(*target.shape, dtype=target.dtype)
