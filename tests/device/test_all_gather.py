"""The weight gather between processes: every transport, uneven shards, random delays, graphs, the profiler's trace."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from baige_device.backends.cuda.all_gather import fp8_all_gather
from baige_device.backends.cuda.all_gather_choice import force_transport, transport_for
from baige_device.backends.cuda.all_gather_memory import allocate_shard
from baige_device.backends.cuda.all_gather_peer import KERNEL_UP_TO_BYTES
from tests.device.gpu import needs_gpu
from tests.device.ranks import run_ranks

pytestmark = [needs_gpu, pytest.mark.device]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")

SIZES = [[4096, 4096], [7, 70_001], [0, 333], [1, 0], [5 << 20, 3 << 20], [0, 0]]


def content(salt: int, rank: int, size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(97 * salt + rank))


def pause(salt: int, rank: int) -> None:
    time.sleep(random.Random(31 * salt + rank).random() * 0.01)


def gather_all_sizes(rank: int, size: int, transport: str) -> None:
    force_transport(None, transport)  # type: ignore[arg-type]
    for salt, sizes in enumerate(SIZES):
        for shared in (False, True):
            mine = content(salt, rank, sizes[rank])
            shard = allocate_shard(sizes[rank]).copy_(mine) if shared else mine.cuda()
            out = torch.full((sum(sizes),), 0xA5, dtype=torch.uint8, device="cuda")
            pause(salt, rank)
            image = fp8_all_gather(shard, sizes, out=out).wait()
            want = torch.cat([content(salt, r, sizes[r]) for r in range(size)])
            assert torch.equal(image.cpu(), want), (transport, sizes, shared)
            assert torch.equal(shard.cpu(), mine)


def gather_in_place(rank: int, size: int, transport: str) -> None:
    """The shard is its own piece of the shared image, and of no other piece."""
    force_transport(None, transport)  # type: ignore[arg-type]
    for salt, sizes in enumerate(SIZES):
        arena = allocate_shard(sum(sizes) + 64)
        image = arena[32 : 32 + sum(sizes)]
        for step in range(3):
            shard = image.split(sizes)[rank]
            image.fill_(0xA5)
            shard.copy_(content(salt + 10 * step, rank, sizes[rank]))
            pause(salt, rank)
            got = fp8_all_gather(shard, sizes, out=image).wait()
            want = torch.cat([content(salt + 10 * step, r, sizes[r]) for r in range(size)])
            assert torch.equal(got.cpu(), want), (transport, sizes)


def gather_under_hazard(rank: int, size: int, transport: str) -> None:
    """Shards change right after `wait`, two images alternate, ranks are late at random: any missing barrier shows."""
    force_transport(None, transport)  # type: ignore[arg-type]
    sizes = [1 << 20] * size
    shard = allocate_shard(sizes[rank])
    images = [torch.empty(sum(sizes), dtype=torch.uint8, device="cuda") for _ in range(2)]
    for step in range(30):
        shard.fill_(7 * step + rank & 255)
        pause(step, rank)
        image = fp8_all_gather(shard, sizes, out=images[step % 2]).wait()
        got = image.view(size, -1)
        low, high = got.amin(1).tolist(), got.amax(1).tolist()
        assert low == high == [7 * step + r & 255 for r in range(size)], (step, low, high)


def gather_in_graph(rank: int, size: int, transport: str) -> None:
    force_transport(None, transport)  # type: ignore[arg-type]
    sizes = [3 << 20] * size
    shard = allocate_shard(sizes[rank])
    image = torch.zeros(sum(sizes), dtype=torch.uint8, device="cuda")
    doubled = torch.zeros_like(image)

    def step() -> None:
        torch.add(fp8_all_gather(shard, sizes, out=image).wait(), 1, out=doubled)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_ in range(10):
        shard.fill_(10 * round_ + rank)
        pause(round_, rank)
        graph.replay()
        torch.cuda.synchronize()
        assert doubled.view(size, -1).float().mean(1).tolist() == [10 * round_ + r + 1 for r in range(size)]
        dist.barrier()


def traced(work: Callable[[], object]) -> list[str]:
    """Names of what the second call puts on the device."""
    work()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        work()
        torch.cuda.synchronize()
    dist.barrier()
    return [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def look_at_trace(rank: int, size: int, transport: str) -> None:
    """The path is read off the profiler's events, not off a flag."""
    force_transport(None, transport)  # type: ignore[arg-type]
    sizes = [8 << 20] * size
    shard = allocate_shard(sizes[rank])
    shard.fill_(rank)
    out = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
    names = traced(lambda: fp8_all_gather(shard, sizes, out=out).wait())
    if rank == 0:
        print(transport, sorted(set(names)))
    copies = [name for name in names if name.startswith("Memcpy")]
    collectives = [name for name in names if "nccl" in name.lower()]
    kernels = [name for name in names if "gather_shards" in name]
    if transport == "copy_engine":
        assert len(copies) >= size
        assert not kernels
        assert not collectives
    elif transport == "peer_kernel":
        assert len(kernels) == 1
        assert not copies
        assert not collectives
    else:
        assert any("AllGather" in name for name in collectives)


def look_at_large_trace(rank: int, size: int, transport: str) -> None:
    """Large shards travel by copy engines; the one kernel copies the own shard."""
    force_transport(None, transport)  # type: ignore[arg-type]
    sizes = [2 * KERNEL_UP_TO_BYTES] * size
    shard = allocate_shard(sizes[rank])
    out = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
    names = traced(lambda: fp8_all_gather(shard, sizes, out=out).wait())
    assert len([name for name in names if name.startswith("Memcpy")]) >= size - 1
    assert len([name for name in names if "gather_shards" in name]) == 1


def everything(rank: int, size: int, transport: str, works: tuple[str, ...]) -> None:
    for work in works:
        globals()[work](rank, size, transport)


def gather_by_turns(rank: int, size: int, transport: str) -> None:
    """Small and large shards alternate, so that both ways of one transport, and graph and eager calls, mix."""
    force_transport(None, transport)  # type: ignore[arg-type]
    largest = 2 * KERNEL_UP_TO_BYTES
    shard = allocate_shard(largest)
    image = torch.empty(size * largest, dtype=torch.uint8, device="cuda")
    for step, num_bytes in enumerate([4096, largest, 16, 1 << 20, largest, 1 << 14, 4096]):
        shard.fill_(5 * step + rank)
        pause(step, rank)
        got = fp8_all_gather(shard[:num_bytes], [num_bytes] * size, out=image[: size * num_bytes]).wait()
        rows = got.view(size, -1)
        assert rows.amin(1).tolist() == rows.amax(1).tolist() == [5 * step + r for r in range(size)], step


HAZARDS = ("gather_all_sizes", "gather_in_place", "gather_under_hazard", "gather_in_graph")


@needs_two
@pytest.mark.parametrize("transport", ["peer_kernel", "copy_engine", "nccl"])
def test_two_gpus(transport: str) -> None:
    run_ranks(everything, 2, transport, (*HAZARDS, "look_at_trace"))


@needs_two
def test_two_gpus_choose_by_size() -> None:
    run_ranks(choose, 2, "by_size")


@needs_two
def test_two_gpus_by_turns() -> None:
    run_ranks(everything, 2, "by_size", ("gather_by_turns", "look_at_large_trace"))


@pytest.mark.parametrize("transport", ["peer_kernel", "copy_engine"])
def test_two_processes_on_one_gpu(transport: str) -> None:
    run_ranks(everything, 2, transport, HAZARDS, share_device=True)


def test_three_processes_on_one_gpu_by_turns() -> None:
    run_ranks(gather_by_turns, 3, "by_size", share_device=True)


def test_two_processes_through_the_host() -> None:
    run_ranks(everything, 2, "staged", HAZARDS[:1], share_device=True)


def choose(rank: int, size: int, expected: str) -> None:
    assert transport_for(None, torch.device("cuda", torch.cuda.current_device())).name == expected


def test_one_rank_copies() -> None:
    shard = torch.arange(200, dtype=torch.uint8, device="cuda")
    assert torch.equal(fp8_all_gather(shard, [200]).wait(), shard)
