"""The weight gather between processes: every transport, uneven shards, random delays, graphs, the profiler's trace."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from baige_device.backends.cuda.all_gather import fp8_all_gather
from baige_device.backends.cuda.all_gather_choice import force_transport, transport_for
from baige_device.backends.cuda.all_gather_memory import allocate_shard
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


def look_at_trace(rank: int, size: int, transport: str) -> None:
    """The path is read off the profiler's events, not off a flag."""
    force_transport(None, transport)  # type: ignore[arg-type]
    sizes = [8 << 20] * size
    shard = allocate_shard(sizes[rank])
    shard.fill_(rank)
    out = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
    fp8_all_gather(shard, sizes, out=out).wait()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        fp8_all_gather(shard, sizes, out=out).wait()
        torch.cuda.synchronize()
    dist.barrier()
    names = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if rank == 0:
        print(transport, sorted(set(names)))
    copies = [name for name in names if name.startswith("Memcpy")]
    collectives = [name for name in names if "nccl" in name.lower()]
    if transport == "copy_engine":
        assert len(copies) >= size
        assert not collectives
    else:
        assert any("AllGather" in name for name in collectives)


def everything(rank: int, size: int, transport: str, works: tuple[str, ...]) -> None:
    for work in works:
        globals()[work](rank, size, transport)


HAZARDS = ("gather_all_sizes", "gather_under_hazard", "gather_in_graph")


@needs_two
@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_two_gpus(transport: str) -> None:
    run_ranks(everything, 2, transport, (*HAZARDS, "look_at_trace"))


@needs_two
def test_two_gpus_choose_the_copy_engine() -> None:
    run_ranks(choose, 2, "copy_engine")


def test_two_processes_on_one_gpu() -> None:
    run_ranks(everything, 2, "copy_engine", HAZARDS, share_device=True)


def test_two_processes_through_the_host() -> None:
    run_ranks(everything, 2, "staged", HAZARDS[:1], share_device=True)


def choose(rank: int, size: int, expected: str) -> None:
    assert transport_for(None, torch.device("cuda", torch.cuda.current_device())).name == expected


def test_one_rank_copies() -> None:
    shard = torch.arange(200, dtype=torch.uint8, device="cuda")
    assert torch.equal(fp8_all_gather(shard, [200]).wait(), shard)
