"""One layer's HiSparse swap in vLLM 0.33's own runtime on an NVIDIA GPU: its kernels against ours, verified first.

    python benchmarks/vllm_swap.py [--requests 8,64] [--context 60000] [--hit-rate 0.9] [OUT.json]

Both runtimes get the same stream of top-k lists; every row that attention would read is compared with the host pool.
Then a step is timed as the host sees it (eager, with Python) and as a CUDA-graph replay, in microseconds a layer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("BAIGE_BACKEND", "cuda")

import torch

PAGE, WIDTH, TOPK, HOT = 64, 656, 2048, 4096
PACE = 30


def build(requests: int, context: int) -> tuple[Any, Any]:
    """A group leader of vLLM's runtime with pinned host rows, and its handle."""
    from vllm.v1.hisparse import runtime as host

    config = host.ResolvedHiSparseConfig(top_k=TOPK, device_buffer_size=HOT, max_union_rows=TOPK)
    made = host.HiSparseRuntime(config, requests, WIDTH, torch.uint8, "cuda", max_swap_rows=requests)
    pages = -(-context // PAGE)
    pool, registered = host.allocate_pinned_host_pool((requests * pages + 1) * PAGE * WIDTH)
    rows = pool.view(torch.uint8).view(-1, WIDTH)
    rows[:, :8] = torch.arange(rows.shape[0]).view(-1, 1).view(torch.uint8)  # each row names itself
    made._host_cache, made.registered_host_pool = rows, registered
    hot_pages = requests * HOT // PAGE
    slab = torch.zeros((hot_pages + 1) * PAGE * WIDTH, dtype=torch.int8, device="cuda")
    table = (torch.randperm(hot_pages, device="cuda") + 1).int().view(requests, -1)
    made.bind_hot_cache(
        slab, byte_offset=0, block_stride=PAGE * WIDTH, num_blocks=hot_pages + 1, block_size=PAGE, block_table=table
    )
    made.request_state_indices = torch.randperm(requests, device="cuda").int()
    handle = host.HiSparseCacheHandle(made)
    handle.index_group_caches, handle.decode_batch = [handle], True
    return made, handle


class Stream:
    """Top-k lists that keep `hit_rate` of their entries from step to step."""

    def __init__(self, requests: int, context: int, hit_rate: float) -> None:
        self.context, self.fresh = context, max(1, round(TOPK * (1 - hit_rate)))
        self.lists = torch.stack([torch.randperm(context, device="cuda")[:TOPK] for _ in range(requests)]).int()

    def __call__(self) -> torch.Tensor:
        for row in self.lists:
            seen = torch.zeros(self.context, dtype=torch.bool, device="cuda")
            seen[row.long()] = True
            rest = (~seen).nonzero().view(-1)
            where = torch.randperm(TOPK, device="cuda")[: self.fresh]
            row[where] = rest[torch.randperm(len(rest), device="cuda")[: self.fresh]].int()
        return self.lists.clone()


def step_of(handle: Any, swap_in: Callable[..., Any], table: torch.Tensor, requests: int) -> Callable[[Any], Any]:
    ids = torch.arange(requests, dtype=torch.int32, device="cuda")
    valid = torch.tensor([requests], dtype=torch.int32, device="cuda")

    def step(topk: torch.Tensor) -> Any:
        handle.runtime.begin_forward()
        return swap_in(
            handle.runtime,
            resident=handle,
            req_id_per_token=ids,
            block_table=table,
            logical_topk_indices=topk,
            block_size=PAGE,
            num_valid_rows=valid,
        )

    return step


def verify(name: str, step: Callable[[Any], Any], runtime: Any, table: torch.Tensor, lists: list[torch.Tensor]) -> None:
    flat = runtime.hot.attention_cache.reshape(-1, WIDTH)
    for number, topk in enumerate(lists):
        rows = step(topk)
        torch.cuda.synchronize()
        names = flat[rows.long().view(-1), :8].contiguous().view(torch.int64).view(topk.shape)
        where = topk.long()
        want = torch.gather(table.long(), 1, where // PAGE) * PAGE + where % PAGE
        wrong = (names != want) | (rows < 0)
        if wrong.any():
            found = [(int(w), int(r), int(n)) for w, r, n in zip(want[wrong], rows[wrong], names[wrong], strict=True)]
            raise SystemExit(
                f"{name}, step {number}: {len(found)} wrong rows (host row, device row, read): {found[:6]}"
            )
        sample = torch.randint(0, topk.numel(), (64,), device="cuda")
        read = flat[rows.long().view(-1)[sample]].cpu()
        if not torch.equal(read, runtime.host_cache[want.view(-1)[sample].cpu()]):
            raise SystemExit(f"{name}, step {number}: rows are torn")


def eager_us(step: Callable[[Any], Any], lists: list[torch.Tensor]) -> tuple[float, float]:
    """Time of a step, and how long the host was busy with it."""
    for topk in lists[:5]:
        step(topk)
    torch.cuda.synchronize()
    busy, begin = 0.0, time.perf_counter()
    for topk in lists[5:]:
        before = time.perf_counter()
        step(topk)
        busy += time.perf_counter() - before
    torch.cuda.synchronize()
    count = len(lists) - 5
    return 1e6 * (time.perf_counter() - begin) / count, 1e6 * busy / count


def graph_us(step: Callable[[Any], Any], lists: list[torch.Tensor]) -> float:
    buffer = lists[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(buffer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(buffer)
    times = []
    for topk in lists:
        buffer.copy_(topk)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000)  # launches are queued before the first one runs
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="8,64")
    parser.add_argument("--context", type=int, default=60000)
    parser.add_argument("--hit-rate", type=float, default=0.9)
    parser.add_argument("out", nargs="?", type=Path)
    args = parser.parse_args()
    import vllm._C_stable_libtorch  # noqa: F401
    from vllm.v1.hisparse.runtime import HiSparseRuntime

    from baige_device.activation import activate
    from baige_device.engines.vllm.cuda_hisparse import replaced

    torch.manual_seed(0)
    ours = replaced(activate().ops, HiSparseRuntime.swap_in)
    results = []
    for requests in map(int, args.requests.split(",")):
        pages = -(-args.context // PAGE)
        # Block 0 is the host's null block; its kernel masks what a table puts there.
        table = (torch.randperm(requests * pages, device="cuda") + 1).int().view(requests, pages)
        stream = Stream(requests, args.context, args.hit_rate)
        lists = [stream() for _ in range(PACE)]
        case: dict[str, Any] = {"requests": requests, "context": args.context, "hit_rate": args.hit_rate}
        for name, swap_in in (("native", HiSparseRuntime.swap_in), ("ours", ours)):
            runtime, handle = build(requests, args.context)
            step = step_of(handle, swap_in, table, requests)
            verify(name, step, runtime, table, lists)
            hits, misses = runtime.index_group.swap_stats.tolist()
            step_us, busy_us = eager_us(step, lists)
            case[name] = {
                "eager_us": round(step_us, 1),
                "host_us": round(busy_us, 1),
                "graph_us": round(graph_us(step, lists), 1),
                "hits": hits,
                "misses": misses,
            }
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(runtime.registered_host_pool.data_ptr())
            del runtime, handle, step
        print(json.dumps(case), flush=True)
        results.append(case)
    if args.out:
        args.out.write_text(json.dumps({"card": torch.cuda.get_device_name(), "cases": results}))


if __name__ == "__main__":
    main()
