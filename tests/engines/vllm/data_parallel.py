"""Two data-parallel ranks with expert parallelism; each serves its half of MODEL's cases and prints one JSON line.

    python -m tests.engines.vllm.data_parallel MODEL [--options JSON] [--rank-environment JSON]

The ranks generate different numbers of tokens, so that one of them runs dummy batches for the other.
`--options` are keyword arguments of `vllm.LLM`. `--rank-environment` is a list of two objects: variables that only this
rank has.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from typing import Any

from baige_device.cli.demo_server import free_port
from tests.engines.vllm.generate import DEFAULTS, cases, generate

RANKS = 2
TOKENS = (10, 16)
PATIENCE_S = 330
GRACE_S = 8


def rank_main(
    rank: int, port: int, model: str, options: dict[str, Any], environment: dict[str, str], answers: Any
) -> None:
    os.environ.update(environment)
    os.environ.update(
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(RANKS),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=str(port),
        VLLM_HOST_IP="127.0.0.1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # the collectives' check is sent to the workers as a function
    )
    status = 0
    try:
        answers.put(serve(rank, model, options))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the host's rank processes can hang in interpreter shutdown


def serve(rank: int, model: str, options: dict[str, Any]) -> str:
    import torch

    torch.set_num_threads(1)
    from vllm import LLM

    llm = LLM(
        model=model,
        **DEFAULTS
        | {"enable_expert_parallel": True, "max_num_batched_tokens": 512, "distributed_executor_backend": "uni"}
        | options,
    )
    tokens = generate(llm, cases(model)[rank::RANKS], TOKENS[rank])
    report = llm.collective_rpc("baige_report")
    gathered = llm.collective_rpc(check_collectives)
    time.sleep(2)  # the other rank may still be in a collective with this one
    llm.llm_engine.engine_core.shutdown()
    return json.dumps({"rank": rank, "tokens": tokens, "reports": report, "gathered": gathered})


def check_collectives(worker: Any) -> dict[str, Any]:
    """The two collectives with a row count per rank, on the worker's EP group: rank r brings r + 1 rows of value r."""
    import torch
    from vllm.distributed import get_ep_group

    group = get_ep_group()
    rank = group.rank_in_group
    sizes = [1, 2]
    rows = torch.full((sizes[rank], 3), float(rank))
    gathered = group.device_communicator.all_gatherv(rows, 0, sizes)
    mine = group.device_communicator.reduce_scatterv(torch.arange(9.0).view(3, 3) * (rank + 1), 0, sizes)
    return {"gathered": gathered.tolist(), "scattered": mine.tolist()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--rank-environment", type=json.loads, default=[{}, {}])
    arguments = parser.parse_args()
    port = free_port()
    context = multiprocessing.get_context("fork")  # nothing of vLLM is imported here; libraries may be
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_main, args=(rank, port, arguments.model, arguments.options, environment, answers))
        for rank, environment in enumerate(arguments.rank_environment)
    ]
    for process in ranks:
        process.start()
    wait_for(ranks)
    for process in ranks:
        if process.is_alive():
            process.kill()
    while not answers.empty():  # printed here, since long lines of two processes would mix
        print("ANSWER " + answers.get(), flush=True)
    return max(abs(process.exitcode or 0) for process in ranks)


def wait_for(ranks: list[Any]) -> None:
    """Until all have ended; when one has failed, the others get a moment to fail for themselves."""
    deadline = time.monotonic() + PATIENCE_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
