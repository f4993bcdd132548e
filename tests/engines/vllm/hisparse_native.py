"""vLLM's own HiSparse runtime on CPU: a leader and a follower layer, every row checked.

python -m tests.engines.vllm.hisparse_native                # its data plane, over our four ops
python -m tests.engines.vllm.hisparse_native swap LIBRARY   # the CUDA mount's, with its translations built for CPU
python -m tests.engines.vllm.hisparse_native split LIBRARY  # the same, divided for overlap
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

WIDTH, PAGE, TOPK, HOT, REQUESTS, HOST_PAGES, LENGTH, KEPT, STEPS = 64, 16, 24, 64, 3, 200, 600, 18, 40


class NoStream:
    """Host tensors have no streams; everything is done when its call returns."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class NoEvent:
    def record(self, stream: object = None) -> None: ...


def mount_swap_on_cpu(path: str) -> None:
    """The CUDA mount's swap, whose kernels run where the tensors are and whose streams do not exist."""
    from baige_device.activation import current
    from baige_device.engines.vllm import cuda_features, cuda_hisparse

    library = ctypes.CDLL(path)
    cuda_hisparse.launch_to_keys = lambda params, rows, device: library.run_to_keys(ctypes.byref(params), rows)
    cuda_hisparse.launch_to_rows = lambda params, rows, device, split: library.run_to_rows(ctypes.byref(params), rows)
    cuda_hisparse._copy_stream = lambda group: NoStream()
    features = SimpleNamespace(ops=current().ops)
    cuda_features.cuda_features = lambda: features
    torch.cuda.Event = NoEvent
    torch.cuda.current_stream = NoStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    cuda_hisparse.mount_swap(features)


def split_rows(handle: Any, table: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
    """What attention reads in two passes, as one list a query in no order."""
    from baige_device.engines.vllm.cuda_hisparse import split_swap

    handle.source_block_table = table
    batch = SimpleNamespace(
        req_id_per_token=torch.arange(REQUESTS, dtype=torch.int32),
        query_start_loc=torch.arange(REQUESTS + 1, dtype=torch.int32),
    )
    swap = split_swap(handle, topk, batch)
    swap.join()
    lists = []
    for hits, late, count in zip(swap.hit_rows, swap.late_rows, swap.late_counts.tolist(), strict=True):
        assert late[count:].eq(-1).all()
        lists.append(torch.cat([hits[hits >= 0], late[:count]]))
    return torch.stack(lists)


def layer(runtime: Any, config: Any, group: Any) -> Any:
    made = runtime.HiSparseRuntime(
        config, REQUESTS, WIDTH, torch.float32, "cpu", max_swap_rows=REQUESTS, index_group=group
    )
    pool = torch.randn(HOST_PAGES, PAGE, WIDTH)
    made.registered_host_pool, made._host_cache = pool, pool.view(-1, WIDTH)
    pages = REQUESTS * HOT // PAGE
    hot = torch.zeros(pages + 1, PAGE, WIDTH)
    table = torch.arange(1, 1 + pages, dtype=torch.int32).view(REQUESTS, -1)
    made.bind_hot_cache(
        hot.view(-1).view(torch.int8),
        byte_offset=0,
        block_stride=PAGE * WIDTH * 4,
        num_blocks=pages + 1,
        block_size=PAGE,
        block_table=table,
    )
    made.request_state_indices = torch.tensor([2, 0, 1], dtype=torch.int32)
    return made


def main() -> None:
    from vllm.v1.hisparse import runtime

    from baige_device.activation import activate
    from baige_device.engines.vllm.hisparse_ops import define_hisparse_ops

    activate()
    define_hisparse_ops()
    mode, *library = sys.argv[1:] or ["ops"]
    assert runtime._has_hisparse_ops()
    empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **options: empty(*shape, **options)
    runtime._create_copy_stream = lambda device: NoStream()
    runtime.current_stream = NoStream
    runtime.in_piecewise_cudagraph = lambda: False
    torch.Event = NoEvent
    if mode != "ops":
        mount_swap_on_cpu(library[0])
    torch.manual_seed(0)
    config = runtime.ResolvedHiSparseConfig(top_k=TOPK, device_buffer_size=HOT, max_union_rows=TOPK)
    leader = layer(runtime, config, None)
    layers = [leader, layer(runtime, config, leader.index_group)]
    handles = [runtime.HiSparseCacheHandle(made) for made in layers]
    for handle in handles:
        handle.index_group_caches, handle.decode_batch = handles, True
    table = (
        (torch.randperm(HOST_PAGES - 1)[: REQUESTS * (LENGTH // PAGE + 1)] + 1).view(REQUESTS, -1).int()
    )  # 0: the null block
    recent = [torch.randperm(LENGTH)[:TOPK] for _ in range(REQUESTS)]
    wrong = 0
    for _ in range(STEPS):
        for request in range(REQUESTS):  # most of the top-k carries over from the step before
            kept = recent[request][torch.randperm(TOPK)[:KEPT]]
            drawn = torch.randperm(LENGTH)
            recent[request] = torch.cat([kept, drawn[~torch.isin(drawn, kept)][: TOPK - KEPT]])
        topk = torch.stack(recent).int()
        for handle in handles:
            handle.runtime.begin_forward()
        for handle in handles:
            if mode == "split":
                rows = split_rows(handle, table, topk)
            else:
                rows, _ = handle.swap_in(
                    torch.arange(REQUESTS, dtype=torch.int32),
                    table,
                    topk,
                    block_size=PAGE,
                    num_valid_rows=torch.tensor([REQUESTS], dtype=torch.int32),
                    return_valid_counts=True,
                )
            pool = handle.runtime.hot.attention_cache.reshape(-1, WIDTH)
            for request in range(REQUESTS):
                where = topk[request].long()
                host = table[request, where // PAGE].long() * PAGE + where % PAGE
                read, want = pool[rows[request].long()], handle.runtime.host_cache[host]
                if mode == "split":  # in another order
                    read, want = read[read[:, 0].argsort()], want[want[:, 0].argsort()]
                wrong += not torch.equal(read, want)
    hits, misses = leader.index_group.swap_stats.tolist()
    print("ANSWER " + json.dumps({"wrong_rows": wrong, "hits": hits, "misses": misses}), flush=True)


if __name__ == "__main__":
    main()
