"""Runs a function on several ranks, one spawned process each, on as many GPUs or all on one."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

__all__ = ["run_ranks"]


def run_ranks(
    work: Callable[..., None],
    size: int,
    *args: Any,
    share_device: bool = False,
    timeout_s: int = 100,
    shared_backend: str = "cpu:gloo",
) -> None:
    """Call `work(rank, size, *args)` on every rank inside an initialised process group; raises what a rank raised.

    `shared_backend` is the group's backend where all ranks share one device, which NCCL refuses.
    """
    if not share_device and torch.cuda.device_count() < size:
        raise RuntimeError(f"run_ranks: {size} GPUs needed, {torch.cuda.device_count()} found")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(
            _rank, args=(size, folder, share_device, timeout_s, shared_backend, work, args), nprocs=size, join=False
        )
        while not context.join(timeout_s):
            pass


def _rank(
    rank: int,
    size: int,
    folder: str,
    share_device: bool,
    timeout_s: int,
    shared_backend: str,
    work: Callable[..., None],
    args: Any,
) -> None:
    if share_device:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0 if share_device else rank)
    backend = shared_backend if share_device else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(f"{folder}/store", size)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    try:
        work(rank, size, *args)
        torch.cuda.synchronize()
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        # The other ranks may hang in a collective; leaving at once makes the parent end them.
        os._exit(1)
    dist.destroy_process_group()
