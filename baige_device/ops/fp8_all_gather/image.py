"""The flat byte image of one layer's quantised weights, and how it is cut into one shard a rank.

`fp8_all_gather` moves bytes in rank order; this module says what they are. All weights of a layer are cut into block
rows (the rows that share a row of scales). The block rows of all weights, one after the other, are dealt out to the
ranks in contiguous runs of about equal bytes, so a cut never goes through a block and a scale always travels with its
block row. A run of block rows of one weight on one rank is a piece:

    image  = shard of rank 0 | shard of rank 1 | ...
    shard  = piece | piece | ...           (empty when there are fewer block rows than ranks)
    piece  = payload [rows, N], row by row | scales fp32 [block rows, blocks a row]      each padded to 16 bytes

A whole layer is cut at N - 1 places, so most weights are one piece. Because pieces start on block edges, quantising
them one by one gives the same bits as quantising the whole weight on one rank, for any number of ranks.

Everything here is pure: the ops that quantise and dequantise are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.quantize_blocks.contract import WIRE_FORMATS, check_block, check_wire, scale_shape

__all__ = [
    "ALIGNMENT_BYTES",
    "ImageLayout",
    "Piece",
    "WeightSpec",
    "pack_shard",
    "piece_views",
    "plan_image",
    "unpack_weight",
]

_OP = "fp8_all_gather"
ALIGNMENT_BYTES = 16
"""Every segment of the image starts at a multiple of this, for vector loads."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight `[rows, columns]` of the layer and its wire format; see `quantize_blocks` for `wire` and `block`."""

    name: str
    rows: int
    columns: int
    wire: str = "fp8_e4m3"
    block: tuple[int, int] = (128, 128)

    @property
    def block_rows(self) -> int:
        return scale_shape(self.rows, self.columns, self.block)[0]

    def payload_bytes(self, rows: int) -> int:
        return rows * self.columns * WIRE_FORMATS[self.wire][0].itemsize

    def scales_shape(self, rows: int) -> tuple[int, int]:
        return scale_shape(rows, self.columns, self.block)


@dataclass(frozen=True)
class Piece:
    """Rows `[row_start, row_stop)` of one weight on one rank; offsets are bytes from the start of the image."""

    spec: WeightSpec
    row_start: int
    row_stop: int
    payload_offset: int
    scales_offset: int
    end: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start


@dataclass(frozen=True)
class ImageLayout:
    """Where everything is. Equal on all ranks, because it follows from specs and rank count alone."""

    specs: tuple[WeightSpec, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """The pieces of each rank, in image order."""
    shard_bytes: tuple[int, ...]
    """The size of each rank's shard: the argument of `fp8_all_gather`. Multiples of 16, 0 for a rank without pieces."""

    @property
    def image_bytes(self) -> int:
        return sum(self.shard_bytes)

    def shard_offset(self, rank: int) -> int:
        """First byte of the rank's shard in the image."""
        return sum(self.shard_bytes[:rank])

    def spec(self, name: str) -> WeightSpec:
        """One weight's spec. Raises `KeyError` for a weight that the layout does not have."""
        for spec in self.specs:
            if spec.name == name:
                return spec
        raise KeyError(f"no weight {name!r} in the image; it has {', '.join(spec.name for spec in self.specs)}")

    def pieces_of(self, name: str) -> list[Piece]:
        """All pieces of one weight, by rising row; none when it has no rows. Raises `KeyError` like `spec`."""
        spec = self.spec(name)
        return [piece for pieces in self.pieces for piece in pieces if piece.spec is spec]


def plan_image(specs: Sequence[WeightSpec], ranks: int) -> ImageLayout:
    """Lay out a layer's weights over `ranks` ranks.

    Raises:
        ContractError: no rank, two weights of one name, a negative size, unknown wire format, or a bad block.
    """
    _check(specs, ranks)
    runs = _deal(specs, ranks)
    pieces: list[tuple[Piece, ...]] = []
    sizes = []
    offset = 0
    for rank in range(ranks):
        placed: list[Piece] = []
        start = offset
        for spec, first, last in runs[rank]:
            piece = _place(spec, first, last, offset)
            placed.append(piece)
            offset = piece.end
        pieces.append(tuple(placed))
        sizes.append(offset - start)
    return ImageLayout(tuple(specs), tuple(pieces), tuple(sizes))


def pack_shard(
    layout: ImageLayout,
    rank: int,
    weights: Mapping[str, Tensor],
    quantize: Callable[..., tuple[Tensor, Tensor]],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Quantise this rank's pieces of the layer's weights into its shard.

    Args:
        weights: each weight of the layer by name, `[rows, columns]`; only the rows of this rank's pieces are read.
        quantize: the op `quantize_blocks`.
        out: uint8 `[shard_bytes[rank]]` on the weights' device, 16-byte aligned; None allocates.
    Returns:
        the shard, uint8 `[shard_bytes[rank]]`; padding bytes are zero.
    Raises:
        ContractError: a weight of another shape; NaN or inf in a weight (from `quantize`).
    """
    base = layout.shard_offset(rank)
    if out is None:
        device = next(iter(weights.values())).device if weights else torch.device("cpu")
        out = torch.empty(layout.shard_bytes[rank], dtype=torch.uint8, device=device)
    out.zero_()
    for piece in layout.pieces[rank]:
        spec, weight = piece.spec, weights[piece.spec.name]
        if tuple(weight.shape) != (spec.rows, spec.columns):
            raise ContractError(
                _OP, f"weight {spec.name!r}.shape", f"[{spec.rows}, {spec.columns}]", str(list(weight.shape))
            )
        rows = weight[piece.row_start : piece.row_stop]
        quantized = quantize(rows, block=spec.block, wire=spec.wire, name=spec.name)
        for target, source in zip(_views(piece, out, base), quantized, strict=True):
            # As bytes: not every backend copies 8-bit floats.
            target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
    return out


def piece_views(layout: ImageLayout, image: Tensor, name: str) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Every piece of one weight with its payload `[rows, columns]` and scales: views of the image `[image_bytes]`."""
    for piece in layout.pieces_of(name):
        payload, scales = _views(piece, image, 0)
        yield piece, payload, scales


def unpack_weight(
    layout: ImageLayout,
    image: Tensor,
    name: str,
    dequantize: Callable[..., Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise one weight from the gathered image: one `dequantize_blocks` a piece.

    Args:
        image: uint8 `[image_bytes]`, 16-byte aligned. dequantize: the op `dequantize_blocks`.
        dtype: bf16, fp16 or fp32; ignored when `out` `[rows, columns]` is given.
    Returns:
        the weight `[rows, columns]`, bit-equal to dequantising what one rank quantised whole.
    """
    spec = layout.spec(name)
    if out is None:
        out = torch.empty(spec.rows, spec.columns, dtype=dtype, device=image.device)
    for piece, payload, scales in piece_views(layout, image, name):
        dequantize(payload, scales, block=spec.block, out=out[piece.row_start : piece.row_stop])
    return out


def _check(specs: Sequence[WeightSpec], ranks: int) -> None:
    if ranks < 1:
        raise ContractError(_OP, "ranks", ">= 1", str(ranks))
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ContractError(_OP, "specs", "one spec a weight name", f"names {names}")
    for spec in specs:
        check_wire(_OP, spec.wire)
        check_block(_OP, spec.block)
        if spec.rows < 0 or spec.columns < 0:
            raise ContractError(_OP, f"weight {spec.name!r}", "sizes >= 0", f"[{spec.rows}, {spec.columns}]")


def _deal(specs: Sequence[WeightSpec], ranks: int) -> list[list[tuple[WeightSpec, int, int]]]:
    """Deal the block rows of all weights to the ranks: for each rank, runs (weight, first, last block row).

    A block row goes to the rank in whose equal share of the bytes its middle lies.
    """
    bytes_of = [
        spec.payload_bytes(min(spec.block[0], spec.rows - row * spec.block[0])) + 4 * spec.scales_shape(1)[1]
        for spec in specs
        for row in range(spec.block_rows)
    ]
    total, before, index = sum(bytes_of), 0, 0
    runs: list[list[tuple[WeightSpec, int, int]]] = [[] for _ in range(ranks)]
    for spec in specs:
        for row in range(spec.block_rows):
            middle = 2 * before + bytes_of[index]
            mine = runs[min(ranks - 1, middle * ranks // (2 * total))] if total else runs[0]
            if mine and mine[-1][0] is spec:
                mine[-1] = (spec, mine[-1][1], row)
            else:
                mine.append((spec, row, row))
            before += bytes_of[index]
            index += 1
    return runs


def _place(spec: WeightSpec, first: int, last: int, offset: int) -> Piece:
    start, stop = first * spec.block[0], min((last + 1) * spec.block[0], spec.rows)
    scales_offset = _align(offset + spec.payload_bytes(stop - start))
    scales_bytes = 4 * math.prod(spec.scales_shape(stop - start))
    return Piece(spec, start, stop, offset, scales_offset, _align(scales_offset + scales_bytes))


def _views(piece: Piece, buffer: Tensor, base: int) -> tuple[Tensor, Tensor]:
    """Payload and scales of a piece as views of a buffer that starts at byte `base` of the image."""
    spec = piece.spec
    payload = _segment(buffer, piece.payload_offset - base, (piece.rows, spec.columns), WIRE_FORMATS[spec.wire][0])
    return payload, _segment(buffer, piece.scales_offset - base, spec.scales_shape(piece.rows), torch.float32)


def _segment(buffer: Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
