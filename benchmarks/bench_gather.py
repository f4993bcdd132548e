"""The gather family: copying scattered rows over the host link, alone and behind the hot-cache lookup.

Host memory is managed memory, as `host_alloc` gives it, and in the cases that say so registered memory. The engines'
own kernels run beside lookup and copy where their libraries are named (`gather_peers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from baige_device.backends.cuda.gather import uva_sparse_gather, uva_sparse_scatter
from baige_device.backends.cuda.resolve import hot_cache_resolve
from baige_device.cli.bench_case import BenchCase, Peer
from baige_device.ops.hot_cache_resolve.contract import empty_plan
from benchmarks import gather_peers
from benchmarks.host_pool import host_rows

OPS = ("uva_sparse_gather", "uva_sparse_scatter", "hot_cache_resolve", "resolve+gather")
WANTED, SLOTS = 2048, 4096
STEPS = ((1, 205, 60_000), (8, 205, 60_000), (32, 205, 60_000), (128, 205, 20_000), (128, 205, 60_000))
LONG_STEPS = ((128, 205, 100_000), (128, 205, 200_000), (128, 512, 200_000))


def cases() -> Iterator[BenchCase]:
    torch.manual_seed(0)
    for row_bytes in (656, 1152):
        for sms in (1, 2, 4, 6, 8, 16):
            yield copy_case("uva_sparse_gather", row_bytes, sms)
        yield copy_case("uva_sparse_scatter", row_bytes, 8)
    for batch, misses, context in (*STEPS, *LONG_STEPS):
        large = (batch, context) == (128, 60_000) or (batch, misses, context) in LONG_STEPS
        for registered in (False, True) if large else (False,):
            case = step_case(batch, misses, context, with_gather=True, registered=registered)
            yield case
            if large:
                yield behind_writes(case)
    for batch in (1, 8, 128):
        yield step_case(batch, 205, 60_000, with_gather=False)


def behind_writes(case: BenchCase) -> BenchCase:
    """The case, and its peers, where the L2 cache holds nothing of theirs, as in an engine's step.

    Times include the 64 MB that are written in front, 21 us on an H200.
    """
    junk = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    def behind(run: Callable[[int], object]) -> Callable[[int], object]:
        def both(index: int) -> None:
            junk.fill_(index)
            run(index)

        return both

    return replace(
        case,
        case=f"{case.case}, behind 64 MB of writes",
        run=behind(case.run),
        peers=tuple(replace(peer, run=behind(peer.run)) for peer in case.peers),
        facts={**case.facts, "series": f"{case.facts['series']}, behind writes"},
    )


def copy_case(op: str, row_bytes: int, sms: int) -> BenchCase:
    """128 requests of 512 rows each out of 5 GB, to dense rows of a device pool."""
    requests, each, context = 128, 512, (5 << 30) // 128 // row_bytes
    host = host_rows(requests * context, row_bytes)
    device = torch.randint(0, 256, (requests * each, row_bytes), dtype=torch.uint8, device="cuda")
    first = torch.arange(requests, device="cuda")[:, None] * context
    picks = [
        (first + torch.stack([torch.randperm(context, device="cuda")[:each] for _ in range(requests)])).int().flatten()
        for _ in range(8)
    ]
    dense = torch.arange(requests * each, dtype=torch.int32, device="cuda")

    def run(index: int) -> None:
        if op == "uva_sparse_gather":
            uva_sparse_gather(host, device, picks[index], dense, max_sms=sms)
        else:
            uva_sparse_scatter(device, host, dense, picks[index], max_sms=sms)

    def verify() -> None:
        for index in range(2):
            run(index)
            torch.cuda.synchronize()
            assert torch.equal(device.cpu(), host[picks[index].cpu().long()]), f"{op}: rows differ"

    return BenchCase(
        op,
        f"{row_bytes} B rows, 128 x 512 of 5 GB, {sms} SMs",
        run,
        verify,
        dense.numel() * row_bytes,
        "link",
        len(picks),
        "tuned",
        facts={"sms": sms, "row_bytes": row_bytes, "series": f"{row_bytes} B rows"},
    )


def key_ring(batch: int, misses: int, context: int) -> list[Tensor]:
    """Wanted keys `[batch, 2048]` of successive steps, each with exactly `misses` new ones, in a ring.

    A key comes back only after more than 2048 others have been loaded, when the LRU has evicted it. The newest token is
    not wanted: SGLang's kernel looks for it in a slot of its own.
    """
    steps = -(-(2 * WANTED + 512) // misses)
    length = steps * misses
    ring = torch.stack([torch.randperm(context - 1, device="cuda")[:length] for _ in range(batch)])
    ring += torch.arange(batch, device="cuda")[:, None] * context
    window = torch.arange(WANTED, device="cuda")
    return [ring[:, (step * misses + window) % length].int().contiguous() for step in range(steps)]


def step_case(batch: int, misses: int, context: int, *, with_gather: bool, registered: bool = False) -> BenchCase:
    """One decode step: look 2048 keys of every request up in its cache of 4096 slots, and load what is missing.

    The engines' kernels run out of registered memory, whatever ours does.
    """
    row_bytes = 656
    host = host_rows(batch * context, row_bytes, registered=registered)
    hot = torch.zeros(batch * SLOTS, row_bytes, dtype=torch.uint8, device="cuda")
    keys = key_ring(batch, misses, context)
    slot_keys = torch.full((batch, SLOTS), -1, dtype=torch.int32, device="cuda")
    order = torch.arange(SLOTS, dtype=torch.int16, device="cuda").repeat(batch, 1)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    plan = empty_plan(keys[0])
    first_slots = rows * SLOTS

    def run(index: int) -> None:
        hot_cache_resolve(keys[index], rows, slot_keys, order, out=plan)
        if with_gather:
            uva_sparse_gather(host, hot, plan.miss_keys, plan.miss_slots, plan.miss_counts, dst_offsets=first_slots)

    def verify() -> None:
        for index in (*range(len(keys)), 0, 1):
            run(index)
            if with_gather and index < 2:
                held = hot[(plan.slots + first_slots[:, None]).long().flatten()].cpu()
                assert torch.equal(held, host[keys[index].cpu().long().flatten()]), f"step {index}: rows differ"
        assert plan.miss_counts.tolist() == [misses] * batch, f"misses: {plan.miss_counts.tolist()}"

    def peers() -> tuple[Peer, ...]:
        plans = []
        for index in (*range(len(keys)), *range(len(keys))):  # the second turn's plans are those of a full cache
            run(index)
            plans.append(gather_peers.record(plan, first_slots))
        theirs = host_rows(batch * context, row_bytes, registered=True)
        return gather_peers.step_peers(theirs, keys, plans[len(keys) :], SLOTS)

    op, kind = "resolve+gather" if with_gather else "hot_cache_resolve", ", registered" if registered else ""
    work = batch * misses * row_bytes if with_gather else batch * (WANTED * 16 + 2 * SLOTS * 6)
    return BenchCase(
        op,
        f"{batch} x {misses} misses, {context // 1000}K context{kind}",
        run,
        verify,
        work,
        "link" if with_gather else "copy",
        len(keys),
        "tuned",
        peers=peers() if with_gather and not registered and gather_peers.wanted() else (),
        facts={"batch": batch, "context_tokens": context, "series": f"{batch} x {misses}{kind}"} if with_gather else {},
    )
