"""How much host memory this process may still take: the machine's free memory and every cgroup above the process."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from baige_device.errors import HostMemoryError

__all__ = ["MemoryLimit", "check_host_memory", "memlock_limit", "memory_limits"]

_GIB = 1 << 30
_CAP_IPC_LOCK = 14
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes 'no limit' as a number near 2^63."""


@dataclass(frozen=True)
class MemoryLimit:
    """One limit: what it is, how many bytes it leaves, and what raises it."""

    name: str
    available_bytes: int
    remedy: str


def check_host_memory(op: str, num_bytes: int, root: Path = Path("/")) -> None:
    """Raise `HostMemoryError` when a limit leaves less than `num_bytes`; names the tightest one."""
    limits = memory_limits(root)
    tightest = min(limits, key=lambda limit: limit.available_bytes, default=None)
    if tightest is not None and num_bytes > tightest.available_bytes:
        raise HostMemoryError(
            f"{op}: num_bytes: asked for {num_bytes} bytes ({num_bytes / _GIB:.2f} GiB), but {tightest.name} leaves "
            f"{tightest.available_bytes} bytes ({tightest.available_bytes / _GIB:.2f} GiB); {tightest.remedy}"
        )


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """All limits that can be read below `root` (the file system of a Linux machine)."""
    found = []
    machine = _mem_available(root / "proc/meminfo")
    if machine is not None:
        found.append(MemoryLimit("the machine (MemAvailable)", machine, "ask for less or free memory on this machine"))
    for group in _cgroups(root):
        limit = _cgroup_limit(root, group)
        if limit is not None:
            found.append(limit)
    return found


def memlock_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """RLIMIT_MEMLOCK of this process; it bounds pinned memory on drivers that account it to the process.

    None when nothing binds: the limit is unlimited, or the process holds CAP_IPC_LOCK, which lifts it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock_all(root / "proc/self/status"):
        return None
    remedy = "raise it with `ulimit -l unlimited` (in a container: --ulimit memlock=-1)"
    return MemoryLimit("RLIMIT_MEMLOCK", soft, remedy)


def _may_lock_all(path: Path) -> bool:
    """Whether the process's effective capabilities hold CAP_IPC_LOCK."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
    return False


def _mem_available(path: Path) -> int | None:
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroups(root: Path) -> list[Path]:
    """The process's memory cgroups, innermost first; cgroup v2, or the memory hierarchy of v1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            inner = base / path.lstrip("/")
            groups = [inner, *inner.parents]
            return groups[: groups.index(base) + 1]
    return []


def _cgroup_limit(root: Path, group: Path) -> MemoryLimit | None:
    v2 = (group / "memory.max").exists()
    limit = _read(group / ("memory.max" if v2 else "memory.limit_in_bytes")).strip()
    used = _read(group / ("memory.current" if v2 else "memory.usage_in_bytes")).strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    if int(limit) >= _UNLIMITED_BYTES:
        return None
    name = f"cgroup /{group.relative_to(root)}"
    left = int(limit) - int(used) + _reclaimable(group / "memory.stat")
    return MemoryLimit(name, max(0, left), f"ask for less or raise its limit of {limit} bytes (container memory limit)")


def _reclaimable(path: Path) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    """A file's text; empty when this kernel or container does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
