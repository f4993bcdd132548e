"""host_alloc: exact size, zeros, alignment, limits with their arithmetic, release."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from baige_device.errors import ContractError, HostMemoryError
from baige_device.ops.host_alloc.limits import check_host_memory, memory_limits
from baige_device.registry.table import OpTable

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5 * MIB + 3])
def test_exact_zeroed_aligned(ops: OpTable, size: int) -> None:
    with ops.host_alloc(size) as buffer:
        assert buffer.tensor.shape == (size,)
        assert buffer.tensor.data_ptr() % 4096 == 0
        assert not buffer.tensor.any()
        buffer.tensor.fill_(7)
        assert buffer.kind == "pageable"
    assert buffer.closed
    assert buffer.tensor.numel() == 0
    buffer.close()


def test_zero_bytes(ops: OpTable) -> None:
    with ops.host_alloc(0) as buffer:
        assert buffer.tensor.numel() == 0


@pytest.mark.parametrize("size", [-1, True, 1.5])
def test_bad_sizes_are_refused(ops: OpTable, size: object) -> None:
    with pytest.raises(ContractError, match="num_bytes: expected an int >= 0"):
        ops.host_alloc(size)


def test_close_gives_the_memory_back_even_with_a_view_alive(ops: OpTable) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    buffer = ops.host_alloc(256 * MIB)
    view = buffer.tensor[:10]
    buffer.tensor.fill_(1)
    assert process.memory_info().rss - before > 200 * MIB
    buffer.close()
    assert process.memory_info().rss - before < 100 * MIB
    assert view.numel() == 10


def test_more_than_the_machine_has(ops: OpTable) -> None:
    with pytest.raises(HostMemoryError, match=r"asked for 1152921504606846976 bytes .* leaves \d+ bytes"):
        ops.host_alloc(1 << 60)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}


def test_tightest_cgroup_above_the_process_counts(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": "3000000\n",
            "sys/fs/cgroup/pod/memory.current": "1500000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 500000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "1000000\n",
        },
    )
    assert [limit.available_bytes for limit in memory_limits(root)] == [8000 * 1024, 2000000]
    check_host_memory("host_alloc", 2000000, root)
    with pytest.raises(HostMemoryError, match=r"cgroup /sys/fs/cgroup/pod leaves 2000000 bytes .*limit of 3000000"):
        check_host_memory("host_alloc", 2000001, root)


def test_cgroup_v1(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "5000\n",
        },
    )
    with pytest.raises(HostMemoryError, match="leaves 0 bytes"):
        check_host_memory("host_alloc", 1, root)


def test_without_proc_there_is_no_limit_to_check(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    check_host_memory("host_alloc", 1 << 60, tmp_path)
