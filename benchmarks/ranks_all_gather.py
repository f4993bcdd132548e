"""`fp8_all_gather` on all GPUs of this machine: every transport, bare NCCL beside it. Writes JSON and PNG like `bench`.

python benchmarks/ranks_all_gather.py --out benchmarks/results/all_gather
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baige_device.backends.cuda.all_gather import fp8_all_gather
from baige_device.backends.cuda.all_gather_choice import Name, force_transport
from baige_device.backends.cuda.all_gather_memory import allocate_shard
from baige_device.cli.bench_report import Report, Result, environment, print_row
from baige_device.cli.bench_timing import Limits
from benchmarks.ranks import on_all_gpus

OP = "fp8_all_gather"
MIB = 1 << 20
TRANSPORTS: tuple[Name, ...] = ("by_size", "peer_kernel", "copy_engine")


def median_us(work: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Median over repeats of the time of one of `calls` calls in a row, all ranks starting together."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    return statistics.median(times[2:])


def graphed(work: Callable[[], object], calls: int) -> Callable[[], None]:
    """So many calls, one after the other, as a captured graph: the ranks' skew at the start counts once."""
    work()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph.replay


def one_size(rank: int, size: int, mib: int, link: float) -> list[Result]:
    """Every transport on shards of one size, verified against bare NCCL and timed beside it."""
    sizes, calls = [mib * MIB] * size, 10 if mib <= 25 else 4
    force_transport(None, "by_size")
    shard = allocate_shard(sizes[rank])
    shard.random_(0, 256)
    image = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
    bare = median_us(graphed(lambda: dist.all_gather_into_tensor(image, shard), calls), calls)
    want = image.clone()
    shared_image = allocate_shard(sum(sizes))
    own_piece = shared_image.split(sizes)[rank]
    own_piece.copy_(shard)
    results = []
    for transport in TRANSPORTS:
        force_transport(None, transport)
        ways = {"": (shard, image), "in place": (own_piece, shared_image), "staged copy": (shard.clone(), image)}
        for way, (source, target) in ways.items():
            if way == "":
                target.fill_(0)
            fp8_all_gather(source, sizes, out=target).wait()
            assert torch.equal(target, want), f"{mib} MiB {transport} {way}"
            work = graphed(lambda s=source, to=target: fp8_all_gather(s, sizes, out=to).wait(), calls)
            us = median_us(work, calls)
            received = (size - 1) * sizes[0]
            facts = {"shard_mib": mib, "ranks": size, "gb_per_s": round(received / us / 1e3, 1)}
            case = f"{mib} MiB, {size} GPUs, {transport}{', ' if way else ''}{way}"
            percent = 100 * received / (us * 1e-6) / link
            results.append(Result(OP, case, us, {"nccl": bare}, percent, "peer_link", "tuned", facts))
            if rank == 0:
                print_row(results[-1])
    return results


def one_rank(rank: int, size: int, out: str) -> None:
    link = measure_peer_link(rank, size)
    results = [result for mib in (1, 8, 25, 50, 100, 200) for result in one_size(rank, size, mib, link)]
    if rank == 0:
        Report(environment(), Limits(0, 0, 0, link), results).write(Path(out))


def measure_peer_link(rank: int, size: int) -> float:
    """Bytes a second of a 1 GiB copy from the next GPU, all ranks at once, spread over four streams."""
    force_transport(None, "copy_engine")
    from baige_device.backends.cuda.all_gather_memory import find_shared

    mine = allocate_shard(1 << 30)
    shared = find_shared(mine, dist.group.WORLD)
    assert shared is not None
    target, remote = torch.empty_like(mine), shared.peers[(rank + 1) % size]
    streams = [torch.cuda.Stream() for _ in range(4)]

    def pull() -> None:
        main = torch.cuda.current_stream()
        for stream, to, what in zip(streams, target.chunk(4), remote.chunk(4), strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                to.copy_(what, non_blocking=True)
            main.wait_stream(stream)

    return (1 << 30) / (median_us(pull, 1) * 1e-6)


if __name__ == "__main__":
    on_all_gpus(__doc__, "benchmarks/results/all_gather", one_rank)
