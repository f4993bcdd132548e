"""Contract of `quantize_blocks`, and the wire formats that all weight ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import Cost, OpContract, check_dtype, check_shape

__all__ = ["CONTRACT", "FLOAT_DTYPES", "WIRE_FORMATS", "check_block", "check_wire", "quantize_blocks", "scale_shape"]

_OP = "quantize_blocks"

WIRE_FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "fp8_e4m3": (torch.float8_e4m3fn, 448.0),
    "int8_absmax": (torch.int8, 127.0),
    "bf16": (torch.bfloat16, 0.0),
}
"""Wire format -> (payload dtype, largest magnitude). `bf16` is not scaled: its scales are ones."""

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_blocks(  # type: ignore[empty-body]
    weight: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    wire: str = "fp8_e4m3",
    name: str = "",
) -> tuple[Tensor, Tensor]:
    """Quantise a weight block by block for the wire: payload = round(weight / scale), scale = amax / largest magnitude.

    Args:
        weight: bf16, fp16 or fp32 `[M, N]`; any strides (a non-contiguous weight costs one copy).
        block: rows and columns of a block; edge blocks may be smaller. `(1, 0)` means one scale a row.
        wire: a key of `WIRE_FORMATS`.
        name: the weight's name, for messages.
    Returns:
        payload `[M, N]` of the wire's dtype, contiguous; scales fp32 `[ceil(M/bm), ceil(N/bn)]`, finite and > 0.
    Semantics: saturating, round to nearest even. A zero block gets a finite scale and comes back as exact zeros; so do
        blocks so small that amax / largest magnitude is not a normal fp32 number.
    Raises:
        ContractError: unknown wire, bad block, or a NaN or inf in the weight (names weight and block).
    Cost: reads M*N elements, writes M*N bytes. Meant for load time: it synchronises to report NaN and inf.
    """


def scale_shape(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a `[rows, columns]` weight."""
    height, width = block[0], block[1] or max(columns, 1)
    return -(-rows // height), -(-columns // width)


def check_wire(op: str, wire: str) -> None:
    """Raise `ContractError` for a wire format that does not exist."""
    if wire not in WIRE_FORMATS:
        raise ContractError(op, "wire", " or ".join(WIRE_FORMATS), repr(wire))


def check_block(op: str, block: tuple[int, int]) -> None:
    """Raise `ContractError` unless block is (rows >= 1, columns >= 0)."""
    if len(block) != 2 or block[0] < 1 or block[1] < 0:
        raise ContractError(op, "block", "(rows >= 1, columns >= 1, or 0 for whole rows)", str(block))


def check(
    values: bool, weight: Tensor, *, block: tuple[int, int] = (128, 128), wire: str = "fp8_e4m3", name: str = ""
) -> None:
    check_dtype(_OP, "weight", weight, FLOAT_DTYPES)
    check_shape(_OP, "weight", weight, ("M", "N"))
    check_block(_OP, block)
    check_wire(_OP, wire)


def cost(weight: Tensor, *, block: tuple[int, int] = (128, 128), wire: str = "fp8_e4m3", name: str = "") -> Cost:
    """Bytes read and written."""
    rows, columns = scale_shape(weight.shape[0], weight.shape[1], block)
    payload = torch.empty(0, dtype=WIRE_FORMATS[wire][0]).element_size()
    return Cost(weight.numel() * (weight.element_size() + payload) + 4 * rows * columns)


CONTRACT = OpContract(
    _OP,
    "weights",
    quantize_blocks,
    check,
    cost,
    "quantize_blocks(Tensor weight, *, int[2] block=[128, 128], str wire='fp8_e4m3', str name='') -> (Tensor, Tensor)",
)
