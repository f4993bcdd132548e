"""Puts a wrong byte into an op's own words: which slot or row, whose it is, and whether a row for -1 was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.testing.places import element_index
from baige_device.testing.pools import pool_row

__all__ = ["explain_byte"]

GATHER, SCATTER = "uva_sparse_gather", "uva_sparse_scatter"


@dataclass(frozen=True)
class Entry:
    """One row that a call may move: its name for a message, where it goes, and the row."""

    label: str
    target: int
    row: Tensor
    skip: str = ""
    """Why nothing may be written."""
    zero: bool = False
    """The target becomes zeros."""


def explain_byte(op: str, name: str, args: Mapping[str, Any], before: Mapping[str, Any], byte: int) -> str:
    """What the byte of the storage of argument `name` is to the op, or '' where there is nothing to say.

    `args` are the arguments after the call, `before` their twins from before it.
    """
    entries = _ENTRIES.get(op)
    if entries is None or name not in ("cache", "dst"):
        return ""
    pool = args[name]
    word = "slot" if op == "kv_write" else "row"
    index = element_index(pool, byte)
    if index is None:
        return _beside(pool, byte, word)
    row = index[0] if pool.dim() == 2 else index[0] * pool.shape[1] + index[1]
    inner = f"head {index[2]}, column {index[3]}" if pool.dim() == 4 else f"column {index[-1]}"
    return f"{word} {row}, {inner}: {_owner(pool, row, word, list(entries(op, before)))}"


def _owner(pool: Tensor, row: int, word: str, entries: list[Entry]) -> str:
    for entry in entries:
        if entry.target == row and not entry.skip:
            return f"where {entry.label} goes" + (", whose source is -1: it must become zeros" if entry.zero else "")
    mine = _bytes(pool_row(pool, row))
    for entry in entries:
        if entry.target == row and entry.skip:
            return f"{entry.label} names it, and {entry.skip}"
    for entry in entries:
        if entry.target < 0 and torch.equal(_bytes(entry.row), mine):
            return f"nothing names it, and it holds {entry.label}, whose {word} is -1: a row for -1 was written"
    rows = pool.shape[0] * (1 if pool.dim() == 2 else pool.shape[1])
    if row == rows - 1 and any(entry.target < 0 for entry in entries):
        return f"nothing names it, and it is the last {word}, where -1 wraps to: a row for -1 was written"
    return "nothing names it"


def _beside(pool: Tensor, byte: int, word: str) -> str:
    """Rows of paged pools count within their page, so -1 may also be the last row of page -1."""
    place = byte // pool.element_size() - pool.storage_offset()
    step = pool.stride(0) if pool.dim() == 2 else pool.stride(1)
    starts = [-step] if pool.dim() == 2 else [-step, (pool.shape[1] - 1) * step - pool.stride(0)]
    inside = any(start <= place < start + step for start in starts)
    return f"where {word} -1 would be: a row for -1 was written" if inside else ""


def _bytes(row: Tensor) -> Tensor:
    return row.detach().cpu().contiguous().view(torch.uint8).flatten()


def _written(op: str, before: Mapping[str, Any]) -> Iterator[Entry]:
    values = before["values"]
    for token, slot in enumerate(before["slots"].tolist()[: values.shape[0]]):
        yield Entry(f"token {token}", slot, values[token].to(before["cache"].dtype))


def _copied(op: str, before: Mapping[str, Any]) -> Iterator[Entry]:
    counts, offsets = before.get("count"), before.get("dst_offsets")
    sources, targets = before["src_rows"], before["dst_rows"]
    flat = sources.dim() == 1
    for number, (froms, tos) in enumerate(zip(_lists(sources), _lists(targets), strict=True)):
        live = len(froms) if counts is None else int(counts[number])
        for place, (source, target) in enumerate(zip(froms, tos, strict=True)):
            label = f"entry {place}" if flat else f"entry {place} of request {number}"
            moved = target + int(offsets[number]) if offsets is not None and target >= 0 else target
            if place >= live:
                yield Entry(label, moved, torch.empty(0), f"it is behind the count of {live}")
            elif source < 0:
                skip = "its source is -1: a row for -1 was written" if op == SCATTER else ""
                row = torch.zeros_like(pool_row(before["src"], 0))
                yield Entry(label, moved, row, skip, zero=op == GATHER)
            else:
                yield Entry(label, moved, pool_row(before["src"], source))


def _lists(rows: Tensor) -> list[list[int]]:
    found: list[list[int]] = rows.tolist() if rows.dim() == 2 else [rows.tolist()]
    return found


_ENTRIES: dict[str, Callable[[str, Mapping[str, Any]], Iterator[Entry]]] = {
    "kv_write": _written,
    GATHER: _copied,
    SCATTER: _copied,
}
