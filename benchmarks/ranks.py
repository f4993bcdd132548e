"""Run a benchmark on all GPUs of this machine, one process and one rank each."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def on_all_gpus(description: str | None, results: str, run: Callable[[int, int, str], None]) -> None:
    """Parse `--out` (default: `results`) and call `run(rank, size, out)` on every GPU, in a group of gloo and NCCL."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", default=results, help="path of the results without suffix")
    out = parser.parse_args().out
    size = torch.cuda.device_count()
    if size < 2:
        raise SystemExit(f"expected two GPUs or more, found {size}")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_one_rank, args=(size, f"{folder}/store", out, run), nprocs=size)


def _one_rank(rank: int, size: int, store: str, out: str, run: Callable[[int, int, str], None]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    run(rank, size, out)
    dist.destroy_process_group()
