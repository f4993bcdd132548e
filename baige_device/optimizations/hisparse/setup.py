"""What engines check and print from the settings before anything is allocated: hot tokens, host pool, plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baige_device.errors import HostMemoryError, SettingsError
from baige_device.ops.host_alloc.limits import check_host_memory, memlock_limit
from baige_device.optimizations.hisparse.plan import HiSparsePlan
from baige_device.settings import HiSparseSettings

__all__ = [
    "HISPARSE_OPS",
    "INT16_SLOTS",
    "announce",
    "check_host_pool",
    "choose_hot_tokens",
    "pins",
]

logger = logging.getLogger("baige_device")

HISPARSE_OPS = (
    "host_alloc",
    "hot_cache_resolve",
    "uva_sparse_gather",
    "uva_sparse_scatter",
    "kv_write",
    "sparse_attention",
)
"""Ops that HiSparse calls; `merge_attention` as well when `overlap` is on."""

INT16_SLOTS = 1 << 15
"""Most slots of a hot buffer in an engine that keeps slot numbers as int16."""

_GIB = 1 << 30


def announce(plan: HiSparsePlan, context_tokens: int, *more: str) -> None:
    """Log the plan for requests of `context_tokens` and `more` lines in one block; warn when it does not pay."""
    logger.info("%s", "\n".join(["HiSparse plan", plan.explain(), *more]))
    if not plan.pays:
        logger.warning(
            "HiSparse does not pay here: batch %d with it, %d without, at %d tokens a request",
            plan.batch_with,
            plan.batch_without,
            context_tokens,
        )


def choose_hot_tokens(settings: HiSparseSettings, topk: int, *, tokens_per_step: int = 1, most_slots: int = 0) -> int:
    """Hot tokens of a request; the default leaves room for one top-k more than a step wants.

    `most_slots` is the engine's own bound, such as `INT16_SLOTS`; 0 is none.

    Raises:
        SettingsError: too small for the top-k of a step, or above the bound.
    """
    wanted = topk * tokens_per_step
    hot = settings.hot_tokens or wanted + topk
    origin = "" if settings.hot_tokens else " by default"
    if hot < wanted:
        each = f" of {tokens_per_step} tokens a step" if tokens_per_step > 1 else ""
        raise SettingsError(f"hisparse.hot_tokens: expected >= {wanted} (top-k {topk}{each}), got {hot}{origin}")
    if most_slots and hot > most_slots:
        raise SettingsError(
            f"hisparse.hot_tokens: expected <= {most_slots} (the engine's slot numbers hold no more), got {hot}{origin}"
        )
    return hot


def check_host_pool(
    settings: HiSparseSettings, local_ranks: int, host_facts: Mapping[str, Any], root: Path = Path("/")
) -> int:
    """Bytes of one rank's share of the node's host pool, checked for all ranks together; allocates nothing.

    Call it on every rank before any rank of the node allocates. The machine and the cgroups bound the sum over the
    node's ranks, RLIMIT_MEMLOCK each process.

    Args:
        host_facts: facts of the chosen `host_alloc` offer (`Activation.resolutions`).
        root: file system whose limits are read (tests).
    Raises:
        HostMemoryError: a limit is too small; with the arithmetic and the remedy.
        SettingsError: fewer than one rank.
    """
    if local_ranks < 1:
        raise SettingsError(f"hisparse: local_ranks: expected >= 1, got {local_ranks}")
    node_bytes = int(settings.host_gib_per_node * _GIB)
    rank_bytes = node_bytes // local_ranks
    asked = (
        f"hisparse.host_gib_per_node = {settings.host_gib_per_node:g} GiB over {local_ranks} local ranks "
        f"({rank_bytes / _GIB:.2f} GiB each)"
    )
    check_host_memory(asked, node_bytes, root)
    memlock = memlock_limit(root) if pins(host_facts) else None
    if memlock is not None and rank_bytes > memlock.available_bytes:
        raise HostMemoryError(
            f"{asked}: a rank pins {rank_bytes} bytes, but {memlock.name} leaves {memlock.available_bytes} bytes; "
            f"{memlock.remedy}"
        )
    return rank_bytes


def pins(host_facts: Mapping[str, Any]) -> bool:
    """Whether an offer of `host_alloc` with these facts pins memory that counts against RLIMIT_MEMLOCK."""
    return host_facts.get("kind") == "pinned" and bool(host_facts.get("accounts_memlock", True))
