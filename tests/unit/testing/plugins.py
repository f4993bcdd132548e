"""Importable backends for the kit's own tests (rank processes import them by name)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from baige_device.backends.reference import plugin as reference
from baige_device.ops.base import group_rank_and_size
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict
from tests.unit.testing.mutants import broken_source


def _serves_small_heads(need: Need) -> Verdict:
    size = need.params.get("head_size", 0)
    return Verdict.yes() if size <= 128 else Verdict.no(f"head_size {size} > 128")


@hookimpl
def merge_attention(device: DeviceInfo) -> list[Offer]:
    """A portable tier that is right and a tuned tier that refuses every need."""
    right = reference.merge_attention(device)
    return [
        Offer(right.target, Tier.PORTABLE),
        Offer("baige_device.nowhere:merge", Tier.TUNED, supports=lambda need: Verdict.no("wrong stepping")),
    ]


@hookimpl
def attend_paged(device: DeviceInfo) -> Offer:
    """Refuses wide heads."""
    return Offer(reference.attend_paged(device).target, Tier.TUNED, supports=_serves_small_heads)


@hookimpl
def moe_combine(device: DeviceInfo) -> Offer:
    """Offered without its `moe_dispatch`."""
    return reference.moe_combine(device)


@hookimpl
def kv_write(device: DeviceInfo) -> Offer:
    """A vendor library without the symbol."""
    return Offer("acme:kv_write", Tier.TUNED, available=Verdict.no("libacme.so has no acme_kv_write"))


@hookimpl
def index_topk(device: DeviceInfo) -> Offer:
    """A target that cannot be imported."""
    return Offer("baige_device.nowhere:index_topk", Tier.TUNED)


partial_backend = SimpleNamespace(
    baige_probe=reference.baige_probe,
    merge_attention=merge_attention,
    attend_paged=attend_paged,
    moe_combine=moe_combine,
    kv_write=kv_write,
    index_topk=index_topk,
)
"""Offers five ops, each in its own way."""


def _first_rank_last(op: Any) -> Any:
    def broken(shard: Any, shard_bytes: Any, *, group: Any = None, out: Any = None) -> Any:
        handle = op(shard, shard_bytes, group=group, out=out)
        image = handle.wait()
        if group_rank_and_size(group)[1] > 1 and image.numel():
            image.copy_(image.roll(1))
        return handle

    return broken


misordered_gather = broken_source("fp8_all_gather", _first_rank_last).load()
"""Right on one rank, wrong on two."""


def _local_capacity(op: Any) -> Any:
    def broken(x: Any, topk_ids: Any, topk_weights: Any, *, group: Any = None, **rest: Any) -> Any:
        rank, size = group_rank_and_size(group)
        if size > 1 and rank == 1:
            raise RuntimeError("rank 1 gives up before the collective")
        return op(x, topk_ids, topk_weights, group=group, **rest)

    return broken


deserting_dispatch = broken_source("moe_dispatch", _local_capacity).load()
"""Rank 1 never enters the collective."""
