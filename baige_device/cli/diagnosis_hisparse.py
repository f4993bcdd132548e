"""What `doctor` says about HiSparse: switched on or not, its host pool against the limits, and who offers its ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baige_device.ops.host_alloc.limits import MemoryLimit, memlock_limit, memory_limits
from baige_device.optimizations.hisparse.setup import HISPARSE_OPS, pins
from baige_device.settings import HiSparseSettings

__all__ = ["diagnose_hisparse"]

_GIB = 1 << 30
_RANK_COUNTS = (1, 2, 4, 8)
"""`doctor` does not know how many ranks a server will have on this node."""


def diagnose_hisparse(
    settings: HiSparseSettings, candidates: Mapping[str, list[dict[str, Any]]], absent: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The rows, and what was asked for and cannot work.

    `candidates` and `absent` are `Diagnosis.ops` and `Diagnosis.absent`; both are empty without a chosen backend.
    """
    problems: list[str] = []
    needed = [*HISPARSE_OPS, "merge_attention"] if settings.overlap else list(HISPARSE_OPS)
    ops = {op: _offered(op, candidates, absent) for op in needed} if candidates else {}
    if settings.enabled:
        problems += [f"hisparse: needs {op}: {row['reason']}" for op, row in ops.items() if not row["offered_by"]]
    rows: dict[str, Any] = {
        "on": settings.enabled,
        "hot_tokens": str(settings.hot_tokens or "twice the model's top-k"),
        "overlap": settings.overlap,
        "host_pool": _pool(settings),
        "limits": {},
        "ops": ops,
    }
    if settings.enabled:
        node_bytes = int(settings.host_gib_per_node * _GIB)
        rows["limits"], too_small = _limits(node_bytes)
        problems += too_small
        chosen = next((item for item in candidates.get("host_alloc", []) if item["chosen"]), None)
        memlock = memlock_limit() if chosen and pins(chosen["facts"]) else None
        if memlock is not None:
            rows["limits"][memlock.name] = _memlock(memlock, node_bytes)
    return rows, problems


def _offered(op: str, candidates: Mapping[str, list[dict[str, Any]]], absent: Mapping[str, str]) -> dict[str, Any]:
    for item in candidates.get(op, []):
        if item["chosen"]:
            return {"offered_by": item["candidate"], "tier": item["tier"], "reason": item["reason"]}
    return {"offered_by": "", "tier": "", "reason": absent.get(op, "nobody offers it")}


def _pool(settings: HiSparseSettings) -> str:
    gib = settings.host_gib_per_node
    if not settings.enabled:
        return "none (hisparse.host_gib_per_node is 0)"
    shares = ", ".join(f"{gib / ranks:.2f} on {ranks}" for ranks in _RANK_COUNTS)
    return f"{gib:g} GiB a node; GiB a rank by local ranks: {shares}"


def _limits(node_bytes: int) -> tuple[dict[str, str], list[str]]:
    rows, problems = {}, []
    for limit in memory_limits():
        fits = node_bytes <= limit.available_bytes
        rows[limit.name] = f"{'holds the pool' if fits else 'too small'}: leaves {limit.available_bytes / _GIB:.2f} GiB"
        if not fits:
            problems.append(
                f"hisparse.host_gib_per_node: asked for {node_bytes / _GIB:.2f} GiB on this node, but {limit.name} "
                f"leaves {limit.available_bytes / _GIB:.2f} GiB; {limit.remedy}"
            )
    return rows, problems


def _memlock(limit: MemoryLimit, node_bytes: int) -> str:
    """It bounds each process, so that enough ranks make any pool fit."""
    ranks = -(-node_bytes // max(1, limit.available_bytes))
    if ranks == 1:
        return f"holds the pool: leaves {limit.available_bytes / _GIB:.2f} GiB to each process"
    return (
        f"leaves {limit.available_bytes} bytes to each process: a server of fewer than {ranks} local ranks is refused; "
        f"{limit.remedy}"
    )
