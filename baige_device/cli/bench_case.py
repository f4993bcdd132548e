"""What a benchmark file gives to `baige-device bench`: cases with a check, a timed call, and peers on the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["BenchCase", "Peer"]

Limit = Literal["link", "copy", "matmul", "peer_link"]


@dataclass(frozen=True)
class Peer:
    """Somebody else's kernel on the same inputs. `verify` raises when its result is wrong."""

    name: str
    run: Callable[[int], object]
    verify: Callable[[], None]


@dataclass(frozen=True)
class BenchCase:
    """One measured case.

    `run(i)` queues the op on input set `i` of `sets`; sets are rotated so that no cache serves a replay. `work` is
    counted in the limit's unit: bytes over the host link (`link`), bytes read plus written in device memory (`copy`),
    bytes received from other devices (`peer_link`), or floating-point operations (`matmul`).
    """

    op: str
    case: str
    run: Callable[[int], object]
    verify: Callable[[], None]
    work: int
    limit: Limit
    sets: int = 1
    tier: str = ""
    capturable: bool = True
    peers: tuple[Peer, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain values that the plots use: `sms`, `context_tokens`, `batch`, `row_bytes`."""
