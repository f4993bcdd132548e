"""`fp8_all_gather` on all GPUs of this machine: every transport, bare NCCL beside it. Writes JSON and PNG like `bench`.

python benchmarks/ranks_all_gather.py --out benchmarks/results/all_gather
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baige_device.backends.cuda import all_gather_copy
from baige_device.backends.cuda.all_gather import fp8_all_gather
from baige_device.backends.cuda.all_gather_choice import force_transport
from baige_device.backends.cuda.all_gather_memory import allocate_shard
from baige_device.cli.bench_report import Report, Result, environment, print_row
from baige_device.cli.bench_timing import Limits

OP = "fp8_all_gather"
MIB = 1 << 20


def median_us(work: Callable[[], object], repeats: int = 15) -> float:
    """Median over repeats of the time between events, all ranks starting together."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a captured graph."""
    work()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def one_rank(rank: int, size: int, folder: str, out: str, lanes: tuple[int, ...]) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
    results: list[Result] = []
    link = measure_peer_link(rank, size)
    for mib in (1, 8, 25, 50, 100, 200):
        sizes = [mib * MIB] * size
        image = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
        for count in lanes:
            all_gather_copy._LANES = count
            force_transport(None, "copy_engine")
            shard = allocate_shard(sizes[rank])
            shard.random_(0, 256)
            bare = median_us(graphed(lambda shard=shard, image=image: dist.all_gather_into_tensor(image, shard)))
            want = image.clone()
            for name, source in (("in place", shard), ("staged copy", shard.clone())):
                image.fill_(0)
                fp8_all_gather(source, sizes, out=image).wait()
                assert torch.equal(image, want), f"{mib} MiB {name}"
                us = median_us(graphed(lambda s=source, n=sizes, to=image: fp8_all_gather(s, n, out=to).wait()))
                received = (size - 1) * sizes[0]
                facts = {"shard_mib": mib, "ranks": size, "lanes": count, "gb_per_s": round(received / us / 1e3, 1)}
                case = f"{mib} MiB, {size} GPUs, copy engine, {name}, {count} lanes"
                percent = 100 * received / (us * 1e-6) / link
                results.append(Result(OP, case, us, {"nccl": bare}, percent, "peer_link", "tuned", facts))
                if rank == 0:
                    print_row(results[-1])
    if rank == 0:
        Report(environment(), Limits(0, 0, 0, link), results).write(Path(out))
    dist.destroy_process_group()


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

    return (1 << 30) / (median_us(pull) * 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/all_gather", help="path of the results without suffix")
    parser.add_argument("--lanes", default="2", help="copy streams to try, comma separated")
    arguments = parser.parse_args()
    size = torch.cuda.device_count()
    if size < 2:
        raise SystemExit(f"expected two GPUs or more, found {size}")
    lanes = tuple(int(count) for count in arguments.lanes.split(","))
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(one_rank, args=(size, folder, arguments.out, lanes), nprocs=size)


if __name__ == "__main__":
    main()
