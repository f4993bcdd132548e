"""Run a function on several gloo ranks, each a process of its own, and return what each rank returned."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run_ranks", "spawn_ranks"]


def run_ranks(ranks: int, worker: Callable[..., Any], *args: Any) -> list[Any]:
    """`worker(*args)` on every rank; it must be a module-level function. A failing rank fails the call.

    Ranks are forked from a server that has imported torch and nothing of ours, which saves each that import. Changes of
    the environment do not reach them.
    """
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    return _run("forkserver", ranks, worker, args)


def spawn_ranks(ranks: int, worker: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run_ranks`, in fresh interpreters under the environment of this moment."""
    return _run("spawn", ranks, worker, args)


def _run(method: str, ranks: int, worker: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank_main, (ranks, folder, worker, args), nprocs=ranks, start_method=method)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(ranks)]


def _rank_main(rank: int, ranks: int, folder: str, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
    torch.save(worker(*args), Path(folder) / str(rank))
    dist.barrier()  # nobody leaves while another still needs the store
    sys.stdout.flush()
    sys.stderr.flush()
    # On a busy machine gloo's threads may outlive the destruction of their group, and C++ then aborts the process.
    os._exit(0)
