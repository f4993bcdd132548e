"""`moe_dispatch` + `moe_combine` between all GPUs of this machine, by transport. Writes JSON and PNG like `bench`.

python benchmarks/ranks_moe.py --out benchmarks/results/moe_ranks
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baige_device.backends.portable.moe_combine import moe_combine
from baige_device.backends.portable.moe_dispatch import moe_dispatch
from baige_device.backends.portable.moe_transport import force_transport
from baige_device.cli.bench_report import Report, Result, environment, print_row
from baige_device.cli.bench_timing import Limits
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from benchmarks.ranks import on_all_gpus

EXPERTS, TOPK, HIDDEN = 256, 8, 7168
CALLS = 10


def median_us(work: Callable[[], object]) -> float:
    """Median over runs of the mean of `CALLS` calls, all ranks starting together."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times[2:])


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a captured graph."""
    work()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def dispatcher(transport: str) -> Callable[..., ExpertBatch]:
    if transport == "deep_ep":
        from baige_device.backends.cuda.moe_deep_ep import moe_dispatch as deep_ep_dispatch

        return deep_ep_dispatch
    force_transport(None, transport)  # type: ignore[arg-type]
    return moe_dispatch


def one_case(rank: int, size: int, tokens: int, transport: str, captured: bool) -> Result:
    """Expert-major dispatch of bf16 rows and combine, verified, then timed."""
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=generator).topk(TOPK).indices.int()
    weights = torch.rand(tokens, TOPK, device="cuda", generator=generator)
    dispatch = dispatcher(transport)
    out = torch.empty_like(x)

    def step() -> Tensor:
        batch = dispatch(x, ids, weights, num_experts=EXPERTS, layout="expert_major", max_tokens_per_rank=tokens)
        return moe_combine(batch.x, batch, out=out)

    run = graphed(step) if captured else step
    out.fill_(float("nan"))
    run()
    want = x.double() * weights.double().sum(1, keepdim=True)
    error = ((out.double() - want).abs() / (1 + want.abs())).max().item()
    assert error < 2e-2, f"{transport} T {tokens}: error {error:.1e}, limit 2e-2"
    us = median_us(run)
    name = f"T {tokens} a rank, {size} GPUs, {transport}, {'graph' if captured else 'eager'}"
    facts = {"batch": tokens, "ranks": size, "row_bytes": 2 * HIDDEN}
    return Result(
        "moe_dispatch", name, us, {}, 0.0, "peer_link", "tuned" if transport == "deep_ep" else "portable", facts
    )


def one_rank(rank: int, size: int, out: str) -> None:
    transports = ["all_to_all", "all_gather"]
    if importlib.util.find_spec("deep_ep_cpp") is not None:
        transports.append("deep_ep")
    results = []
    for tokens in (1, 16, 128, 1024, 4096):
        for transport in transports:
            for captured in (False, True) if transport != "all_to_all" else (False,):
                results.append(one_case(rank, size, tokens, transport, captured))
                if rank == 0:
                    print_row(results[-1])
    if rank == 0:
        Report(environment(), Limits(0, 0, 0), results).write(Path(out))


if __name__ == "__main__":
    on_all_gpus(__doc__, "benchmarks/results/moe_ranks", one_rank)
