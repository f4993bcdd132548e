"""Settings to plan: what cannot work is refused with the arithmetic before anything is allocated (A18, A19)."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baige_device.errors import HostMemoryError, SettingsError
from baige_device.optimizations.hisparse.plan import HiSparseFacts, plan_hisparse
from baige_device.optimizations.hisparse.setup import (
    INT16_SLOTS,
    announce,
    check_host_pool,
    choose_hot_tokens,
    pins,
)
from baige_device.settings import HiSparseSettings

GIB = 1 << 30
PINNED = {"kind": "pinned"}
V32 = HiSparseFacts(
    num_layers=61,
    row_bytes=656,
    index_row_bytes=132,
    topk=2048,
    context_tokens=60_000,
    device_kv_bytes=60 << 30,
    host_gib_per_node=1600,
    local_ranks=8,
)


def on(host_gib_per_node: float = 1600, **changes: object) -> HiSparseSettings:
    return HiSparseSettings.model_validate({"host_gib_per_node": host_gib_per_node, **changes})


def machine(root: Path, available_gib: int, cgroup_gib: int = 0, capabilities: int = 0) -> Path:
    """A file system with the limits of a Linux machine."""
    files = {
        "proc/meminfo": f"MemAvailable: {available_gib << 20} kB\n",
        "proc/self/status": f"CapEff:\t{capabilities:016x}\n",
    }
    if cgroup_gib:
        files |= {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": f"{cgroup_gib << 30}\n",
            "sys/fs/cgroup/box/memory.current": "0\n",
        }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_plan_is_logged_in_one_block(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baige_device")
    plan = plan_hisparse(V32)
    announce(plan, V32.context_tokens, "a line of the engine")
    assert [record.getMessage() for record in caplog.records] == [
        f"HiSparse plan\n{plan.explain()}\na line of the engine"
    ]


def test_a_plan_that_does_not_pay_is_said(caplog: pytest.LogCaptureFixture) -> None:
    announce(plan_hisparse(replace(V32, context_tokens=2000)), 2000)
    assert "HiSparse does not pay here: batch 670 with it, 670 without, at 2000 tokens a request" in caplog.text


def test_a_pool_larger_than_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, 1599)
    with pytest.raises(
        HostMemoryError,
        match=r"host_gib_per_node = 1600 GiB over 8 local ranks \(200\.00 GiB each\).*"
        r"the machine \(MemAvailable\) leaves \d+ bytes \(1599\.00 GiB\)",
    ):
        check_host_pool(on(), 8, {}, root)


def test_a_cgroup_smaller_than_the_pool(tmp_path: Path) -> None:
    """One rank's share would fit; the node's total does not."""
    root = machine(tmp_path, 2000, cgroup_gib=1000)
    with pytest.raises(HostMemoryError, match=r"cgroup /sys/fs/cgroup/box leaves .*1000\.00 GiB.*container memory"):
        check_host_pool(on(), 8, {}, root)
    assert check_host_pool(on(1000), 8, {}, root) == 125 * GIB


def test_the_real_machine_is_asked_by_default() -> None:
    rss = psutil.Process().memory_info().rss
    with pytest.raises(HostMemoryError, match=r"asked for \d+ bytes"):
        check_host_pool(on(1e6), 8, PINNED)
    assert psutil.Process().memory_info().rss - rss < 64 << 20


@pytest.mark.parametrize(("gib", "ranks", "share"), [(100, 8, 12.5), (5, 1, 5), (0.5, 4, 0.125)])
def test_the_pool_is_split_over_local_ranks(tmp_path: Path, gib: float, ranks: int, share: float) -> None:
    assert check_host_pool(on(gib), ranks, {}, machine(tmp_path, 256)) == int(share * GIB)


def test_a_node_has_ranks() -> None:
    with pytest.raises(SettingsError, match="local_ranks: expected >= 1, got 0"):
        check_host_pool(on(), 0, {})


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"hot_tokens": 2047}, {}, r"expected >= 2048 \(top-k 2048\), got 2047"),
        ({"hot_tokens": 4096}, {"tokens_per_step": 3}, r"expected >= 6144 \(top-k 2048 of 3 tokens a step\), got 4096"),
        ({"hot_tokens": 32769}, {"most_slots": INT16_SLOTS}, r"expected <= 32768 .*got 32769"),
        ({}, {"tokens_per_step": 16, "most_slots": INT16_SLOTS}, r"expected <= 32768 .*got 34816 by default"),
    ],
)
def test_hot_buffers_that_cannot_work(changes: dict[str, int], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=rf"hisparse\.hot_tokens: {message}"):
        choose_hot_tokens(on(**changes), 2048, **arguments)  # type: ignore[arg-type]


def test_hot_tokens_by_default() -> None:
    assert choose_hot_tokens(on(), 2048) == 4096
    assert choose_hot_tokens(on(), 2048, tokens_per_step=2) == 6144
    assert choose_hot_tokens(on(hot_tokens=32768), 2048, most_slots=INT16_SLOTS) == 32768


def test_which_memory_counts_against_memlock() -> None:
    assert pins(PINNED)
    assert not pins({"kind": "pinned", "accounts_memlock": False})
    assert not pins({})


_LOW_MEMLOCK = """
import os, resource, sys
from baige_device.errors import HostMemoryError
from baige_device.optimizations.hisparse.setup import check_host_pool
from baige_device.settings import HiSparseSettings
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setuid(65534)  # drops CAP_IPC_LOCK, which would lift the limit
settings = HiSparseSettings(host_gib_per_node=0.25)
assert check_host_pool(settings, 2, {"kind": "pinned", "accounts_memlock": False}) == 1 << 27
assert check_host_pool(settings, 2, {}) == 1 << 27
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    check_host_pool(settings, 2, {"kind": "pinned"})
except HostMemoryError as error:
    print(error)
locked = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("VmLck", "VmPin"))]
print(locked, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096)
"""


def test_a_memlock_of_64_kib_in_a_real_process() -> None:
    ran = subprocess.run([sys.executable, "-c", _LOW_MEMLOCK], capture_output=True, text=True, check=True)
    error, state = ran.stdout.splitlines()
    assert error.startswith("hisparse.host_gib_per_node = 0.25 GiB over 2 local ranks (0.12 GiB each): a rank pins ")
    assert "pins 134217728 bytes, but RLIMIT_MEMLOCK leaves 65536 bytes; raise it with `ulimit -l unlimited`" in error
    assert state == "['0', '0'] True"


def test_cap_ipc_lock_lifts_memlock(tmp_path: Path) -> None:
    root = machine(tmp_path, 256, capabilities=1 << 14)
    assert check_host_pool(on(128), 1, PINNED, root) == 128 * GIB
