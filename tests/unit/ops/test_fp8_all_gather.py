"""fp8_all_gather over real gloo ranks, and the byte image; user-demand case A8."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import baige_device
from baige_device.errors import ContractError
from baige_device.ops.fp8_all_gather.image import (
    ALIGNMENT_BYTES,
    WeightSpec,
    pack_shard,
    piece_views,
    plan_image,
    unpack_weight,
)
from baige_device.registry.table import OpTable
from baige_device.settings import Settings
from tests.unit.dist import run_ranks

SIZES = [[5, 5, 5], [0, 7, 3], [9, 0, 0], [0, 0, 0], [1, 64, 33]]
LAYER = [
    WeightSpec("q_proj", 4096, 40, block=(128, 16)),
    WeightSpec("norm", 1, 40, wire="bf16"),
    WeightSpec("o_proj", 96, 130, wire="int8_absmax"),
    WeightSpec("k_proj", 7, 33, block=(1, 0)),
    WeightSpec("none", 0, 8),
]


def make_weights(specs: list[WeightSpec]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {spec.name: torch.randn(spec.rows, spec.columns, generator=generator).bfloat16() for spec in specs}


def one_rank(ops: OpTable, spec: WeightSpec, weight: Tensor) -> Tensor:
    payload, scales = ops.quantize_blocks(weight, block=spec.block, wire=spec.wire)
    return ops.dequantize_blocks(payload, scales, block=spec.block)


def shard_of(rank: int, size: int) -> Tensor:
    return (torch.arange(size) * 7 + rank * 50).to(torch.uint8)


def gather_worker(ranks: int) -> list[list[int]]:
    ops = baige_device.activate(Settings(backend="reference", checks="values")).ops
    rank = torch.distributed.get_rank()
    images = []
    for sizes, buffered in itertools.product(SIZES, [False, True]):
        sizes = sizes[:ranks]
        out = torch.full((sum(sizes),), 123, dtype=torch.uint8) if buffered else None
        handle = ops.fp8_all_gather(shard_of(rank, sizes[rank]), sizes, out=out)
        image = handle.wait()
        assert handle.wait() is image
        assert out is None or image is out
        images.append(image.tolist())
    group = torch.distributed.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        mine = ops.fp8_all_gather(shard_of(rank, 3 + rank), [3, 3 + ranks - 1], group=group).wait()
        by_name = torch.ops.baige.fp8_all_gather(shard_of(rank, 3 + rank), [3, 2 + ranks], group_name=group.group_name)
        assert torch.equal(mine, by_name)
        assert mine.tolist() == [*shard_of(0, 3).tolist(), *shard_of(ranks - 1, 2 + ranks).tolist()]
    layout, weights = plan_image(LAYER, ranks), make_weights(LAYER)
    image = ops.fp8_all_gather(pack_shard(layout, rank, weights, ops.quantize_blocks), layout.shard_bytes).wait()
    for spec in LAYER:
        whole = one_rank(ops, spec, weights[spec.name])
        assert torch.equal(unpack_weight(layout, image, spec.name, ops.dequantize_blocks), whole)
    return images


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_gather_even_uneven_and_empty_shards(ranks: int) -> None:
    wanted = []
    for sizes, _ in itertools.product(SIZES, [False, True]):
        wanted.append([byte for rank, size in enumerate(sizes[:ranks]) for byte in shard_of(rank, size).tolist()])
    assert run_ranks(ranks, gather_worker, ranks) == [wanted] * ranks


def test_one_rank_is_a_copy(ops: OpTable) -> None:
    shard = shard_of(0, 9)
    image = ops.fp8_all_gather(shard, [9]).wait()
    assert torch.equal(image, shard)
    assert image.data_ptr() != shard.data_ptr()
    with pytest.raises(ContractError, match="shard_bytes: expected 1 sizes"):
        ops.fp8_all_gather(shard, [4, 5])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("specs", [LAYER, LAYER[:1], LAYER[2:3], LAYER[3:4], LAYER[4:]], ids=lambda s: s[0].name)
def test_image_of_any_rank_count_has_the_bits_of_one_rank(ops: OpTable, specs: list[WeightSpec], ranks: int) -> None:
    layout, weights = plan_image(specs, ranks), make_weights(specs)
    shards = [pack_shard(layout, rank, weights, ops.quantize_blocks) for rank in range(ranks)]
    assert [shard.numel() for shard in shards] == list(layout.shard_bytes)
    image = torch.cat(shards)
    for spec in specs:
        out = torch.full((spec.rows, spec.columns), 1234.0, dtype=torch.bfloat16)
        unpack_weight(layout, image, spec.name, ops.dequantize_blocks, out=out)
        assert torch.equal(out, one_rank(ops, spec, weights[spec.name]))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_layout_is_aligned_disjoint_balanced_and_cut_on_blocks(ranks: int) -> None:
    layout = plan_image(LAYER, ranks)
    end = 0
    for pieces in layout.pieces:
        for piece in pieces:
            assert piece.payload_offset == end
            assert piece.payload_offset % ALIGNMENT_BYTES == piece.scales_offset % ALIGNMENT_BYTES == 0
            assert piece.scales_offset >= piece.payload_offset + piece.spec.payload_bytes(piece.rows)
            assert piece.row_start % piece.spec.block[0] == 0
            end = piece.end
    assert end == layout.image_bytes
    block_row = 128 * 40 + 4 * 3
    assert max(layout.shard_bytes) <= layout.image_bytes / ranks + 2 * block_row
    assert sum(len(pieces) for pieces in layout.pieces) <= len(LAYER) - 1 + ranks - 1
    for spec in LAYER:
        rows = [row for piece in layout.pieces_of(spec.name) for row in range(piece.row_start, piece.row_stop)]
        assert rows == list(range(spec.rows))


def test_views_alias_the_image(ops: OpTable) -> None:
    layout = plan_image(LAYER[:1], 1)
    image = torch.zeros(layout.image_bytes, dtype=torch.uint8)
    ((_, payload, scales),) = piece_views(layout, image, "q_proj")
    assert payload.shape == (4096, 40)
    assert payload.dtype == torch.float8_e4m3fn
    assert scales.shape == (32, 3)
    assert payload.data_ptr() == image.data_ptr()


def test_bad_layers_are_refused(ops: OpTable) -> None:
    with pytest.raises(ContractError, match="one spec a weight name"):
        plan_image([LAYER[0], LAYER[0]], 2)
    with pytest.raises(ContractError, match="ranks: expected >= 1"):
        plan_image(LAYER, 0)
    with pytest.raises(ContractError, match="wire: expected fp8_e4m3 or"):
        plan_image([WeightSpec("w", 1, 1, wire="fp4")], 1)
    layout = plan_image(LAYER[:1], 1)
    with pytest.raises(KeyError, match="no weight 'x' in the image; it has q_proj"):
        layout.pieces_of("x")
    with pytest.raises(ContractError, match=r"weight 'q_proj'.shape: expected \[4096, 40\], got \[40, 4096\]"):
        pack_shard(layout, 0, {"q_proj": torch.zeros(40, 4096)}, ops.quantize_blocks)
