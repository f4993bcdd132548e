"""The engines' own swap-in kernels beside ours, loaded from the libraries of their wheels where those are at hand.

SGLang's is named as `hisparse_peer.py` says; `BENCH_VLLM_LIB` is `vllm/_C_stable_libtorch.abi3.so`. One that is
not named is left out.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from baige_device.cli.bench_case import Peer
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from benchmarks.hisparse_peer import SglangSwapIn, sglang_available

__all__ = ["record", "step_peers", "wanted"]


def wanted() -> bool:
    """Whether any peer was named."""
    return sglang_available() or _vllm_library() is not None


def _vllm_library() -> str | None:
    return os.environ.get("BENCH_VLLM_LIB")


def record(plan: ResolvePlan, first_slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Host rows, rows of the hot pool and counts of one step's plan, kept for a peer that only copies."""
    targets = torch.where(plan.miss_slots < 0, -1, plan.miss_slots + first_slots[:, None])
    return plan.miss_keys.clone(), targets.int(), plan.miss_counts.clone()


def step_peers(
    host: Tensor, keys: list[Tensor], plans: list[tuple[Tensor, Tensor, Tensor]], slots: int
) -> tuple[Peer, ...]:
    """Peers of one lookup-and-copy step.

    `host` uint8 `[B * context, W]`; `keys` int32 `[B, K]` host rows, one tensor a step; `plans` as `record` gives them.
    """
    found = []
    if sglang_available():
        found.append(_sglang(host, keys))
    library = _vllm_library()
    if library is not None:
        found.append(_vllm(library, host, plans, keys[0].shape[0] * slots))
    return tuple(found)


def _sglang(host: Tensor, keys: list[Tensor]) -> Peer:
    """Lookup and copy in one kernel, one block a request. It takes positions."""
    batch = keys[0].shape[0]
    context = host.shape[0] // batch
    first = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None] * context
    positions = [step - first for step in keys]
    swap_in = SglangSwapIn(host, batch, context)

    def run(index: int) -> None:
        swap_in(positions[index])

    def verify() -> None:
        for index in range(len(keys)):
            run(index)
        held = swap_in.rows[swap_in(positions[0]).long().flatten()].cpu()
        assert torch.equal(held, host[keys[0].flatten().cpu().long()]), "SGLang: rows differ"

    return Peer("SGLang lookup and copy", run, verify)


def _vllm(library: str, host: Tensor, plans: list[tuple[Tensor, Tensor, Tensor]], hot_rows: int) -> Peer:
    """The copy alone, with the plans that our lookup made."""
    torch.ops.load_library(library)
    hot = torch.zeros(hot_rows // 64, 64, host.shape[1], dtype=torch.uint8, device="cuda")

    def run(index: int) -> None:
        torch.ops._C_cache_ops.hisparse_gather_compact(host, hot, *plans[index])

    def verify() -> None:
        run(1)
        rows, targets, counts = (tensor.cpu() for tensor in plans[1])
        live = torch.arange(rows.shape[1]) < counts[:, None]
        held = hot.view(hot_rows, -1)[targets[live].long().cuda()].cpu()
        assert torch.equal(held, host[rows[live].long()]), "vLLM: rows differ"

    return Peer("vLLM copy alone", run, verify)
