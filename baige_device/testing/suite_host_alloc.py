"""Cases of `host_alloc`: exact size, zeroed, aligned, private, and given back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from baige_device.errors import ContractError
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.testing.cases import Case
from baige_device.testing.checks import expect
from baige_device.testing.lab import Lab

__all__ = ["cases"]

OP = "host_alloc"
SIZES = (0, 1, 4095, 4096, 4097, 3 * 2**20 + 5)


def cases() -> list[Case]:
    found = [Case(OP, f"bytes-{size}", partial(_allocate, size)) for size in SIZES]
    return [
        *found,
        Case(OP, "private", _private),
        Case(OP, "zeroed-after-reuse", _zeroed_after_reuse),
        Case(OP, "close-twice", _close_twice),
        Case(OP, "bad-inputs", _bad_inputs, tags=frozenset({"checked"})),
    ]


def _allocate(size: int, lab: Lab) -> float:
    made = lab.ops.host_alloc(size)
    expect(isinstance(made, HostBuffer), f"result: expected a HostBuffer, got {type(made).__name__}")
    with made as buffer:
        tensor = buffer.tensor
        expect(tensor.dtype == torch.uint8, f"tensor.dtype: expected uint8, got {tensor.dtype}")
        expect(tuple(tensor.shape) == (size,), f"tensor.shape: expected [{size}], got {list(tensor.shape)}")
        expect(tensor.device.type == "cpu", f"tensor.device: expected cpu, got {tensor.device}")
        expect(tensor.is_contiguous(), "tensor: expected contiguous")
        expect(
            size == 0 or tensor.data_ptr() % 4096 == 0, f"address {tensor.data_ptr():#x}: expected 4096-byte alignment"
        )
        expect(not bool(tensor.any()), "tensor: expected zeros")
        kinds = ("pinned", "managed", "pageable")
        expect(buffer.kind in kinds, f"kind: expected one of {', '.join(kinds)}, got {buffer.kind!r}")
        expect(
            lab.device.type == "cpu" or buffer.kind != "pageable", "kind: an accelerator cannot read pageable memory"
        )
        tensor.fill_(255)
        expect(int(tensor.sum()) == 255 * size, "tensor: what was written does not come back")
    expect(buffer.closed and buffer.tensor.numel() == 0, "after close: expected closed=True and an empty tensor")
    return 0.0


def _private(lab: Lab) -> float:
    with lab.ops.host_alloc(5000) as first, lab.ops.host_alloc(5000) as second:
        first.tensor.fill_(1)
        expect(not bool(second.tensor.any()), "two buffers share memory")
    return 0.0


def _zeroed_after_reuse(lab: Lab) -> float:
    for _ in range(8):
        with lab.ops.host_alloc(123_457) as buffer:
            expect(not bool(buffer.tensor.any()), "a reused buffer holds the bytes of its former user")
            buffer.tensor.fill_(255)
    return 0.0


def _close_twice(lab: Lab) -> float:
    buffer = lab.ops.host_alloc(4096)
    buffer.close()
    buffer.close()
    with lab.ops.host_alloc(4096) as other:
        other.tensor.fill_(3)
        buffer.close()
        expect(int(other.tensor.sum()) == 3 * 4096, "closing a closed buffer freed another one")
    return 0.0


def _bad_inputs(lab: Lab) -> float:
    values: tuple[Any, ...] = (-1, 1.5, True, "4096")
    for value in values:
        try:
            lab.ops.host_alloc(value)
        except ContractError as error:
            expect(error.op == OP and error.argument == "num_bytes", f"num_bytes={value!r}: the error names {error}")
        else:
            expect(False, f"num_bytes={value!r}: expected ContractError")
    return 0.0
