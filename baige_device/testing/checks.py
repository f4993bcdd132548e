"""Comparisons: what is equal, what is close, and what must not have been touched."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from baige_device.testing.places import describe_byte, element_index, element_text

__all__ = [
    "Mismatch",
    "check_close",
    "check_equal",
    "check_list",
    "check_members",
    "check_pair",
    "check_storage",
    "check_untouched",
    "expect",
    "few",
    "named_tensors",
    "storage_bytes",
    "twin",
    "twins",
]

_SHOWN = 6
"""Entries of a list that a message shows."""


class Mismatch(AssertionError):
    """An op did not do what its contract says.

    `argument` and `byte` say which byte of which argument's storage is wrong, where that is what was found.
    """

    def __init__(self, message: str, argument: str = "", byte: int = -1) -> None:
        super().__init__(message)
        self.argument = argument
        self.byte = byte


def expect(condition: bool, message: str) -> None:
    """Raise `Mismatch` unless the condition holds (an assert that `python -O` keeps)."""
    if not condition:
        raise Mismatch(message)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor, as uint8, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def twin(tensor: Tensor) -> Tensor:
    """A CPU copy of a tensor together with the whole storage around it, with the same strides and offset."""
    copied = storage_bytes(tensor).cpu().clone().untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())


def named_tensors(args: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the arguments; those inside a tuple or a dataclass share its name."""
    for name, value in args.items():
        for item in _parts(value):
            if isinstance(item, Tensor):
                yield name, item


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return tuple(vars(value).values()) if dataclasses.is_dataclass(value) else (value,)


def twins(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as they are now: every tensor replaced by its CPU twin."""
    return {name: _twin_of(value) for name, value in args.items()}


def _twin_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return twin(value)
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        copies = [_twin_of(item) for item in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {name: twin(item) for name, item in vars(value).items() if isinstance(item, Tensor)}
        return dataclasses.replace(value, **changed)
    return value


def check_untouched(args: Mapping[str, Any], before: Mapping[str, Any], mutates: tuple[str, ...]) -> None:
    """Every byte of every argument's storage is as before, except the elements of the arguments named in `mutates`."""
    allowed: dict[int, Tensor] = {}
    for name, tensor in named_tensors(args):
        if name in mutates:
            key = tensor.untyped_storage().data_ptr()
            mask = _covered(tensor)
            allowed[key] = allowed[key] | mask if key in allowed else mask
    for (name, tensor), (_, old) in zip(named_tensors(args), named_tensors(before), strict=True):
        changed = storage_bytes(tensor).cpu() != storage_bytes(old)
        writable = allowed.get(tensor.untyped_storage().data_ptr())
        if writable is not None:
            changed &= ~writable
        where = changed.nonzero()
        if where.numel():
            kind = "memory around it" if name in mutates else "it, or memory around it"
            first = int(where[0])
            place = describe_byte(name, tensor, first)
            raise Mismatch(f"{name}: {kind} was written: {where.numel()} byte(s), the first at {place}", name, first)


def _covered(tensor: Tensor) -> Tensor:
    """Bool per byte of the storage: is it an element of this view?"""
    width = tensor.element_size()
    total = tensor.untyped_storage().nbytes()
    elements = torch.zeros(-(-total // width), dtype=torch.bool)
    elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return elements.repeat_interleave(width)[:total]


def check_storage(name: str, got: Tensor, want: Tensor) -> None:
    """The storage of `got` equals the storage of `want` (a CPU twin) byte for byte, gaps and guards included."""
    have, need = storage_bytes(got).cpu(), storage_bytes(want)
    where = (have != need).nonzero()
    if where.numel():
        first = int(where[0])
        index = element_index(got, first)
        codes = f"expected byte {int(need[first]):#04x}, got {int(have[first]):#04x}"
        if index is not None:
            codes = f"expected {element_text(want, index)}, got {element_text(got, index)}"
        place = describe_byte(name, got, first)
        raise Mismatch(f"{name}: {where.numel()} wrong byte(s), the first at {place}: {codes}", name, first)


def check_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Same shape, dtype and values; NaN equals NaN."""
    _check_like(name, got, want)
    left, right = got.detach().cpu(), want.cpu()
    wrong = left != right
    if left.is_floating_point():
        wrong &= ~(left.double().isnan() & right.double().isnan())
    where = wrong.nonzero()
    if where.numel():
        first = where[0].tolist()
        raise Mismatch(
            f"{name}{first}: expected {right[tuple(first)].item()}, got {left[tuple(first)].item()} "
            f"({where.shape[0]} of {wrong.numel()} differ)"
        )


def check_close(name: str, got: Tensor, want: Tensor, limit: float) -> float:
    """Largest |got - want| / (1 + |want|); infinities must match exactly and NaN is always wrong.

    Returns the worst error; raises `Mismatch` when it exceeds `limit`. `want` is float64, data are of unit scale.
    """
    expect(tuple(got.shape) == tuple(want.shape), f"{name}.shape: expected {list(want.shape)}, got {list(got.shape)}")
    if got.numel() == 0:
        return 0.0
    left, right = got.detach().cpu().double(), want.cpu().double()
    error = (left - right).abs() / (1 + right.abs())
    error = torch.where(left == right, torch.zeros_like(error), error)
    error = torch.where(error.isnan(), torch.full_like(error, torch.inf), error)
    worst = float(error.max())
    if worst > limit:
        first = (error == error.max()).nonzero()[0].tolist()
        raise Mismatch(
            f"{name}{first}: expected {right[tuple(first)].item():.6g}, got {left[tuple(first)].item():.6g}; "
            f"error {worst:.3g} > {limit:.3g} ({int((error > limit).sum())} of {error.numel()} are over)"
        )
    return worst


def check_list(name: str, got: Sequence[int], want: Sequence[int]) -> None:
    """The same integers in the same order; the message shows the first difference and the next few entries."""
    expect(len(got) == len(want), f"{name}: expected {len(want)} entries, got {len(got)}")
    wrong = [place for place, (have, need) in enumerate(zip(got, want, strict=True)) if have != need]
    if wrong:
        first = wrong[0]
        raise Mismatch(
            f"{name}[{first}]: expected {want[first]}, got {got[first]} ({len(wrong)} of {len(want)} differ; "
            f"from there: expected {few(want[first:])}, got {few(got[first:])})"
        )


def check_members(name: str, got: Sequence[int], want: Sequence[int]) -> None:
    """The same integers in any order; the message shows a few of those that are missing and of those too many."""
    missing, surplus = (sorted((Counter(one) - Counter(other)).elements()) for one, other in ((want, got), (got, want)))
    expect(not missing and not surplus, f"{name}: missing {few(missing)}, not expected {few(surplus)}")


def check_pair(result: Any, names: str) -> None:
    """The op returned a tuple of two, which `names` calls by what they are."""
    found = type(result).__name__
    expect(isinstance(result, tuple) and len(result) == 2, f"result: expected the tuple ({names}), got {found}")


def few(values: Sequence[int]) -> str:
    """The first values of a list, and how many more there are."""
    rest = len(values) - _SHOWN
    return f"[{', '.join(map(str, values[:_SHOWN]))}{f', ... {rest} more' if rest > 0 else ''}]"


def _check_like(name: str, got: Tensor, want: Tensor) -> None:
    expect(tuple(got.shape) == tuple(want.shape), f"{name}.shape: expected {list(want.shape)}, got {list(got.shape)}")
    expect(got.dtype == want.dtype, f"{name}.dtype: expected {want.dtype}, got {got.dtype}")
