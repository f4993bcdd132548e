"""Block quantisation of weights: kernels in a graph, out of the caches, against the device's own copy rate.

The limit is the rate of a 1 GiB copy. Small weights cannot reach it, since a kernel's start and end count: the peers
are copies that move as many bytes as the case does, by the driver and by an elementwise kernel, replayed the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baige_device.backends.portable.dequantize import dequantize_blocks
from baige_device.backends.portable.quantize import quantize_blocks, quantize_into
from baige_device.cli.bench_case import BenchCase, Peer
from baige_device.ops.quantize_blocks.contract import scale_shape
from baige_device.ops.quantize_blocks.reference import expand_scales

OPS = ("quantize_blocks", "dequantize_blocks")
SHAPES = ((7168, 2112), (7168, 7168), (16384, 7168))
FOOTPRINT_BYTES = 1 << 30


def cases() -> Iterator[BenchCase]:
    torch.manual_seed(0)
    for block in ((128, 128), (1, 0)):
        for shape in SHAPES:
            yield quantize_case(shape, block)
            yield dequantize_case(shape, block)


def label(shape: tuple[int, int], block: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}, {'per row' if block[1] == 0 else f'{block[0]} x {block[1]}'}"


def copies_of(num_bytes: int, sets: int) -> tuple[Peer, Peer]:
    """Copies that read and write `num_bytes` together, over as many buffers as the case has."""
    sources = [torch.randint(0, 1 << 60, (num_bytes // 16,), device="cuda") for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]

    def verify() -> None:
        targets[0].copy_(sources[0])
        torch.bitwise_or(sources[1], 0, out=targets[1])
        assert torch.equal(targets[0], sources[0])
        assert torch.equal(targets[1], sources[1])

    return (
        Peer("memcpy of the same bytes", lambda i: targets[i].copy_(sources[i]), verify),
        Peer("copy kernel, same bytes", lambda i: torch.bitwise_or(sources[i], 0, out=targets[i]), verify),
    )


def quantize_case(shape: tuple[int, int], block: tuple[int, int]) -> BenchCase:
    sets = max(2, FOOTPRINT_BYTES // (3 * shape[0] * shape[1]))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    payloads = [torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(sets)]
    blocks = scale_shape(*shape, block)
    amax, scales = (torch.empty(blocks, device="cuda") for _ in range(2))

    def run(index: int) -> None:
        quantize_into(weights[index], payloads[index], amax, scales, block, "fp8_e4m3")

    def verify() -> None:
        run(1)
        wide = weights[1].float()
        error = (payloads[1].float() * expand_scales(scales, shape, block) - wide).abs()
        # e4m3 keeps three bits of mantissa; below 2**-6 of the scale the steps are 2**-9.
        bound = wide.abs() / 16 + expand_scales(scales, shape, block) / 1024
        assert bool((error <= bound * 1.001).all()), f"quantize_blocks: error {float((error - bound).max())}"

    work = shape[0] * shape[1] * 3 + 4 * blocks[0] * blocks[1]
    return BenchCase(
        "quantize_blocks", label(shape, block), run, verify, work, "copy", sets, "portable", peers=copies_of(work, sets)
    )


def dequantize_case(shape: tuple[int, int], block: tuple[int, int]) -> BenchCase:
    sets = max(2, FOOTPRINT_BYTES // (3 * shape[0] * shape[1]))
    coded = [quantize_blocks(torch.randn(shape, device="cuda"), block=block) for _ in range(sets)]
    outs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]

    def run(index: int) -> None:
        dequantize_blocks(*coded[index], block=block, out=outs[index])

    def verify() -> None:
        run(1)
        want = (coded[1][0].float() * expand_scales(coded[1][1], shape, block)).bfloat16()
        assert torch.equal(outs[1], want), "dequantize_blocks: differs from payload times scale"

    work = shape[0] * shape[1] * 3 + 4 * coded[0][1].numel()
    return BenchCase(
        "dequantize_blocks",
        label(shape, block),
        run,
        verify,
        work,
        "copy",
        sets,
        "portable",
        peers=copies_of(work, sets),
    )
