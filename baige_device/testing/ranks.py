"""Runs the cases of several ranks: one spawned process a rank, a fresh process group a case, one merged outcome."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from baige_device.testing.cases import Case, rank_cases
from baige_device.testing.runner import Outcome, Runner, merge_ranks, open_backend

__all__ = ["RankOptions", "run_ranks"]

_FAILURES_BEFORE_STOP = 5
"""A failing collective can cost each case its time-out, so a backend that is plainly broken is not run to the end."""


@dataclass(frozen=True)
class RankOptions:
    """What every rank is told. `share_device` puts all ranks on device 0 (gloo only; for IPC transports)."""

    backend: str
    ranks: int
    seed: int
    plugin: str = ""
    tier: str = ""
    ops: tuple[str, ...] = ()
    torch_device: str = ""
    share_device: bool = False
    case_timeout_s: float = 20.0
    """How long a collective of one case may wait for the other ranks."""


def run_ranks(
    options: RankOptions, on_done: Callable[[Outcome], None] | None = None, timeout_s: float = 600.0
) -> list[Outcome]:
    """Run every multi-rank case on `options.ranks` processes and merge the ranks' outcomes, the worst one first.

    A rank that dies or hangs past `timeout_s` fails the cases it did not finish. Backends are found by name, or by
    `options.plugin`, in every process.
    """
    cases = rank_cases(options.ops)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="baige-ranks-") as folder:
        workers = [
            context.Process(target=_worker, args=(options, rank, folder), daemon=True) for rank in range(options.ranks)
        ]
        for worker in workers:
            worker.start()
        _join(workers, time.monotonic() + timeout_s)
        per_rank = [_read(Path(folder) / f"rank-{rank}.jsonl") for rank in range(options.ranks)]
    exits = [worker.exitcode for worker in workers]
    outcomes = []
    for case in cases:
        outcome = merge_ranks([_of_rank(case, found, code) for found, code in zip(per_rank, exits, strict=True)])
        outcomes.append(dataclasses.replace(outcome, case=f"{outcome.case}[{options.ranks}]"))
        if on_done is not None:
            on_done(outcomes[-1])
    return outcomes


def _join(workers: list[Any], deadline: float) -> None:
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _read(path: Path) -> dict[str, Outcome]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {f"{outcome.op}/{outcome.case}": outcome for outcome in found}


def _of_rank(case: Case, found: dict[str, Outcome], exit_code: int | None) -> Outcome:
    missing = Outcome(case.op, case.id, "failed", reason=f"the process ended (exit {exit_code}) before this case")
    return found.get(case.name, missing)


def _worker(options: RankOptions, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", options.ranks)
    report = Path(folder) / f"rank-{rank}.jsonl"
    with report.open("w", encoding="utf-8") as lines:
        cases = rank_cases(options.ops)
        try:
            runner = _open(options, rank, store)
        except _Unfit as reason:
            for case in cases:
                _write(lines, Outcome(case.op, case.id, "skipped", reason=str(reason)))
            return
        failures = 0
        for case in cases:
            outcome = Outcome(case.op, case.id, "skipped", reason=f"{failures} cases before it failed; not run")
            if failures < _FAILURES_BEFORE_STOP:
                outcome = runner.run(case, dist.new_group(timeout=timedelta(seconds=options.case_timeout_s)))
            _write(lines, outcome)
            failures += "failed" in _exchange(store, case.name, rank, options, outcome.status)
        dist.destroy_process_group()


class _Unfit(Exception):
    """These ranks cannot be had on this machine."""


def _open(options: RankOptions, rank: int, store: Store) -> Runner:
    backend, device = open_backend(options.backend, options.plugin)
    kind = torch.device(options.torch_device or device.torch_device).type
    target, transport = kind, "gloo"
    if kind != "cpu" and options.share_device:
        target = f"{kind}:0"
    elif kind != "cpu":
        count = torch.cuda.device_count() if kind == "cuda" else 1
        if count < options.ranks:
            raise _Unfit(f"ranks: {options.ranks} devices needed, {count} found (or share one device)")
        target, transport = f"{kind}:{rank}", f"cpu:gloo,{kind}:nccl"
    if target.startswith("cuda"):
        torch.cuda.set_device(target)
    dist.init_process_group(transport, store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120))
    return Runner(
        backend, device, seed=options.seed, tier=options.tier, torch_device=target, rank=rank, size=options.ranks
    )


def _write(lines: Any, outcome: Outcome) -> None:
    lines.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    lines.flush()


def _exchange(store: Store, name: str, rank: int, options: RankOptions, status: str) -> list[str]:
    """Every rank's status of one case; waits for ranks that still run it."""
    store.set(f"status/{name}/{rank}", status)
    keys = [f"status/{name}/{other}" for other in range(options.ranks)]
    store.wait(keys, timedelta(seconds=4 * options.case_timeout_s))
    return [store.get(key).decode() for key in keys]
