"""Where a byte of a storage lies in a view of it: the element's index, or how far outside the view."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

__all__ = ["describe_byte", "element_index", "element_text"]


def element_index(tensor: Tensor, byte: int) -> tuple[int, ...] | None:
    """Index of the element that the byte of the tensor's storage belongs to; None for bytes outside the view."""
    width = tensor.element_size()
    if not tensor.numel():
        return None
    # A table of the whole storage, because strides may be in any order, have gaps, or mean nothing (dimensions of 1).
    table = torch.full((-(-tensor.untyped_storage().nbytes() // width),), -1)
    order = torch.arange(tensor.numel()).view(tensor.shape)
    table.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(order)
    flat = int(table[byte // width])
    return None if flat < 0 else tuple(int(axis) for axis in torch.unravel_index(torch.tensor(flat), tensor.shape))


def describe_byte(name: str, tensor: Tensor, byte: int) -> str:
    """`cache[2, 5, 0, 17]`, or where the byte lies beside the view."""
    index = element_index(tensor, byte)
    if index is not None:
        return f"{name}{list(index)}"
    width = tensor.element_size()
    first = tensor.storage_offset() * width
    if byte < first:
        return f"{first - byte} bytes before the first element of {name}"
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    end = first + (last + 1) * width if tensor.numel() else first
    where = f"{byte - end} bytes behind the end" if byte >= end else f"{byte - first} bytes from the start, in a gap"
    return f"{where} of {name}"


def element_text(tensor: Tensor, index: tuple[int, ...]) -> str:
    """The element's value, for floating point with its bits: not every NaN is the same."""
    element = tensor[index].detach().cpu().contiguous().view(1)
    if not element.is_floating_point():
        return str(int(element.item()))
    code = bytes(element.view(torch.uint8).tolist())[:: 1 if sys.byteorder == "big" else -1].hex()
    return f"{element.double().item():.6g} (0x{code})"
