"""Cases of `fp8_all_gather`: byte images of all ranks' shards in rank order, uneven and empty ones included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from baige_device.ops.quantize_blocks.contract import scale_shape
from baige_device.testing.cases import Case, bad_inputs
from baige_device.testing.checks import check_equal, check_untouched, expect, twins
from baige_device.testing.lab import Lab

__all__ = ["cases", "rank_cases"]

OP = "fp8_all_gather"
SIZES = (0, 1, 7, 4097, 70_001)
RANK_SIZES: dict[str, Callable[[int, int], int]] = {
    "even": lambda rank, size: 4096,
    "uneven": lambda rank, size: 1000 * rank + 7,
    "first-empty": lambda rank, size: 0 if rank == 0 else 333,
    "last-empty": lambda rank, size: 0 if rank == size - 1 else 333,
    "all-empty": lambda rank, size: 0,
    "one-byte": lambda rank, size: 1,
    "only-one-rank": lambda rank, size: 50_001 if rank == size // 2 else 0,
}


def cases() -> list[Case]:
    found = []
    for size in SIZES:
        for given in (True, False):
            name = f"one-rank-{size}-bytes{'' if given else '-allocated'}"
            found.append(Case(OP, name, partial(_gather, partial(_constant, size), given), {"ranks": 1}))
    found.append(_bad())
    return found


def _constant(value: int, rank: int, size: int) -> int:
    return value


def rank_cases() -> list[Case]:
    tags = frozenset({"ranks"})
    found = [Case(OP, f"ranks-{name}", partial(_gather, sizes, True), tags=tags) for name, sizes in RANK_SIZES.items()]
    found.append(Case(OP, "ranks-uneven-allocated", partial(_gather, RANK_SIZES["uneven"], False), tags=tags))
    found.append(Case(OP, "ranks-two-in-flight", _two_in_flight, tags=tags))
    uses = ("quantize_blocks",)
    found.append(Case(OP, "ranks-sharded-weight", _sharded_weight, {"wire": "int8_absmax"}, uses, tags))
    return found


def _shards(lab: Lab, sizes: Callable[[int, int], int], salt: int = 0) -> tuple[list[torch.Tensor], list[int]]:
    counts = [sizes(rank, lab.size) for rank in range(lab.size)]
    shards = [
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=lab.generator(10 * salt + rank))
        for rank, count in enumerate(counts)
    ]
    return shards, counts


def _gather(sizes: Callable[[int, int], int], given: bool, lab: Lab) -> float:
    shards, counts = _shards(lab, sizes)
    shard = lab.out((counts[lab.rank] + 1,), torch.uint8)[1:]
    shard.copy_(shards[lab.rank])
    args: dict[str, Any] = {"shard": shard, "shard_bytes": counts, "group": lab.group}
    if given:
        args["out"] = lab.out((sum(counts),), torch.uint8)
    before = twins(args)
    lab.pause()
    handle = lab.ops.fp8_all_gather(**args)
    lab.pause()
    for _ in range(2):
        image = handle.wait()
        lab.synchronize()
        check_equal("image", image, torch.cat(shards))
    check_untouched(args, before, ("out",))
    if given:
        expect(image.data_ptr() == args["out"].data_ptr(), "image: expected the buffer given as out")
    return 0.0


def _two_in_flight(lab: Lab) -> float:
    """Two gathers into two buffers, waited for in the order in which they started."""
    flights = []
    for salt in (1, 2):
        shards, counts = _shards(lab, RANK_SIZES["uneven"], salt)
        out = lab.out((sum(counts),), torch.uint8)
        shard = shards[lab.rank].to(lab.device)
        lab.pause()
        flights.append((lab.ops.fp8_all_gather(shard, counts, group=lab.group, out=out), torch.cat(shards), shard))
    for handle, want, _ in flights:
        image = handle.wait()
        lab.synchronize()
        check_equal("image", image, want)
    return 0.0


def _sharded_weight(lab: Lab) -> float:
    """A weight split on block edges, quantised shard by shard and gathered, equals the weight quantised on one rank."""
    block, blocks, columns = (16, 32), lab.size + 1, 70
    weight = torch.randn(blocks * block[0] - 5, columns, generator=lab.generator(5)).to(lab.device)
    edges = [min(weight.shape[0], block[0] * (2 * rank if rank < 2 else rank + 1)) for rank in range(lab.size)]
    edges.append(weight.shape[0])
    images = []
    for rank in range(lab.size):
        payload, scales = lab.ops.quantize_blocks(
            weight[edges[rank] : edges[rank + 1]], block=block, wire="int8_absmax"
        )
        images.append((payload.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()))
    shard = torch.cat(images[lab.rank])
    counts = [sum(part.numel() for part in image) for image in images]
    image = lab.ops.fp8_all_gather(shard, counts, group=lab.group).wait()
    lab.synchronize()
    whole_payload, whole_scales = lab.ops.quantize_blocks(weight, block=block, wire="int8_absmax")
    expect(
        tuple(whole_scales.shape) == scale_shape(weight.shape[0], weight.shape[1], block),
        "scales of the whole weight: wrong shape",
    )
    parts = [image[start : start + count] for start, count in zip(_starts(counts), counts, strict=True)]
    payload = torch.cat([part[: pay.numel()] for part, (pay, _) in zip(parts, images, strict=True)])
    scales = torch.cat([part[pay.numel() :] for part, (pay, _) in zip(parts, images, strict=True)])
    check_equal("payload", payload, whole_payload.view(torch.uint8).flatten().cpu())
    check_equal("scales", scales, whole_scales.view(torch.uint8).flatten().cpu())
    return 0.0


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:rank]) for rank in range(len(counts))]


def _bad() -> Case:
    def good(lab: Lab) -> dict[str, Any]:
        return {
            "shard": lab.integers(0, 256, 100, dtype=torch.uint8),
            "shard_bytes": [100],
            "out": lab.out((100,), torch.uint8),
        }

    Change = Callable[[Lab, dict[str, Any]], dict[str, Any]]
    changes: dict[str, Change] = {
        "shard_bytes: two sizes": lambda lab, args: {"shard_bytes": [50, 50]},
        "shard_bytes: negative": lambda lab, args: {"shard_bytes": [-1]},
        "shard.shape": lambda lab, args: {"shard": args["shard"][1:]},
        "shard.dtype": lambda lab, args: {"shard": args["shard"].view(torch.int8)},
        "shard.stride": lambda lab, args: {"shard": args["shard"][::2], "shard_bytes": [50]},
        "out.shape": lambda lab, args: {"out": args["out"][1:]},
        "out.dtype": lambda lab, args: {"out": args["out"].view(torch.int8)},
    }
    return bad_inputs(OP, good, changes, {"ranks": 1})
