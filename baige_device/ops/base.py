"""What a contract consists of, and the argument checks that all contracts share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baige_device.errors import ContractError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "INDEX_DTYPES",
    "Cost",
    "OpContract",
    "check_distinct",
    "check_dtype",
    "check_finite",
    "check_index_values",
    "check_inner_contiguous",
    "check_not_empty",
    "check_not_input",
    "check_number",
    "check_same_device",
    "check_shape",
    "check_writable",
    "group_rank_and_size",
    "raise_together",
    "repeats",
]

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Cost:
    """Work of one call: bytes that must cross the named memory or link, and floating-point operations."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class OpContract:
    """The machine-readable half of a contract; the documented signature is `signature`'s docstring.

    `check(values, *args, **kwargs)` takes the op's own arguments and raises `ContractError`; with `values=False` it
    must not read device memory. `cost(*args, **kwargs)` gives the least work a perfect implementation does.
    `schema` is the `torch.library` schema, or None for an op whose arguments no schema can express.
    """

    name: str
    family: str
    signature: Callable[..., Any]
    check: Callable[..., None]
    cost: Callable[..., Cost]
    schema: str | None = None


def check_dtype(op: str, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise `ContractError` unless the tensor has one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ContractError(op, f"{argument}.dtype", names, str(tensor.dtype).removeprefix("torch."))


def check_shape(op: str, argument: str, tensor: Tensor, expected: Sequence[int | str]) -> None:
    """Raise `ContractError` unless the shape matches; a string stands for any size and names it in the message."""
    wanted = tuple(expected)
    actual = tuple(tensor.shape)
    if len(actual) != len(wanted) or any(
        isinstance(want, int) and want != have for want, have in zip(wanted, actual, strict=False)
    ):
        raise ContractError(op, f"{argument}.shape", f"[{', '.join(map(str, wanted))}]", str(list(actual)))


def check_inner_contiguous(op: str, argument: str, tensor: Tensor, dims: int = 1) -> None:
    """Raise `ContractError` unless the last `dims` dimensions are dense; outer strides are free."""
    expected = 1
    for dim in range(1, dims + 1):
        if tensor.shape[-dim] != 1 and tensor.stride(-dim) != expected and tensor.numel() > 0:
            raise ContractError(
                op, f"{argument}.stride", f"the last {dims} dimension(s) contiguous", str(list(tensor.stride()))
            )
        expected *= tensor.shape[-dim]


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """Raise `ContractError` unless all given tensors live on the device of the first."""
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = (name, tensor)
        elif tensor.device != first[1].device:
            raise ContractError(op, f"{name}.device", f"{first[1].device} (as {first[0]})", str(tensor.device))


def check_not_empty(op: str, argument: str, tensor: Tensor, *dims: int) -> None:
    """Raise `ContractError` if one of these dimensions has no elements."""
    for dim in dims:
        if tensor.shape[dim] == 0:
            raise ContractError(op, f"{argument}.shape[{dim}]", ">= 1", "0")


def check_number(op: str, argument: str, value: int, minimum: int) -> None:
    """Raise `ContractError` unless `value` is an integer, `minimum` or more."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or not value >= minimum:
        raise ContractError(op, argument, f"an integer >= {minimum}", repr(value))


def check_finite(op: str, argument: str, value: float, minimum: float = -math.inf) -> None:
    """Raise `ContractError` unless `value` is a finite number, `minimum` or more."""
    if not isinstance(value, int | float | torch.SymFloat) or not (math.isfinite(value) and value >= minimum):
        bound = "" if minimum == -math.inf else f" >= {minimum:g}"
        raise ContractError(op, argument, f"a finite number{bound}", repr(value))


def check_writable(op: str, argument: str, tensor: Tensor) -> None:
    """Raise `ContractError` if elements of an output share memory, as an expanded tensor's do."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ContractError(op, f"{argument}.stride", "memory of its own for every element", str(list(tensor.stride())))


def check_not_input(op: str, argument: str, output: Tensor | None, **inputs: Tensor) -> None:
    """Raise `ContractError` if a given output begins where an input does. Other overlaps are not looked for."""
    if output is None or output.numel() == 0 or output.device.type == "meta":
        return
    for name, tensor in inputs.items():
        if tensor.numel() and output.data_ptr() == tensor.data_ptr():
            raise ContractError(op, argument, f"memory apart from {name}", f"the memory of {name}")


def check_index_values(op: str, argument: str, index: Tensor, size: int) -> None:
    """Raise `ContractError` if an index is neither -1 nor in `[0, size)`. Reads the tensor."""
    if index.numel() == 0:
        return
    bad = (index < -1) | (index >= size)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise ContractError(
            op, f"{argument}{where}", f"-1 or an index in [0, {size})", str(int(index[tuple(where)].item()))
        )


def check_distinct(op: str, argument: str, ids: Tensor) -> None:
    """Raise `ContractError` if an id other than -1 appears twice. Reads the tensor."""
    values, order = ids.flatten().sort(stable=True)
    twice = repeats(values)
    if bool(twice.any()):
        at = int(twice.nonzero()[0])
        first, second = (_position(ids, int(order[at + step])) for step in (0, 1))
        raise ContractError(
            op, f"{argument}{second}", "each row named once", f"{int(values[at])} as in {argument}{first}"
        )


def repeats(ordered: Tensor) -> Tensor:
    """Whether each id of lists `[..., K]` in rising order, other than -1, comes again behind: bool `[..., K-1]`."""
    return (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)


def _position(tensor: Tensor, flat: int) -> list[int]:
    """Where the flat index lies in the tensor."""
    return [int(axis) for axis in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def group_rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group and the group's size; (0, 1) without torch.distributed."""
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def raise_together(op: str, error: ContractError | None, group: ProcessGroup | None) -> None:
    """Raise `ContractError` on every rank of the group when one rank brings an error: that of the lowest such rank.

    A collective through the host, for ops whose other ranks would wait for a rank that refused its arguments.
    """
    import torch.distributed as dist

    found: list[tuple[str, str, str] | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else (error.argument, error.expected, error.got)
    dist.all_gather_object(found, mine, group=group)
    for rank, first in enumerate(found):
        if first is not None:
            argument, expected, got = first
            raise ContractError(op, argument, expected, f"{got} on rank {rank}") from error
