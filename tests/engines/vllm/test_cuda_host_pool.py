"""HiSparse's host pool from `host_alloc` in vLLM's own pool object, on CPU with the reference ops."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.activation import activate, current, deactivate
from baige_device.settings import Settings

BLOCK, WIDTH = 4, 16


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BAIGE_BACKEND", "reference")  # vLLM resolves its platform at the first import
    activate(Settings(backend="reference"))
    yield
    deactivate()


def make_pool(size: int, *, shared: bool = False) -> Any:
    """vLLM's pool object after `allocate`, and that function's result."""
    from vllm.v1.hisparse.runtime import HiSparseHostPool

    from baige_device.engines.vllm import cuda_host_pool

    pool: Any = HiSparseHostPool(SimpleNamespace(), SimpleNamespace(hisparse_shared_host_pool=shared))
    allocate = cuda_host_pool.allocating(current().ops, HiSparseHostPool.allocate)
    return pool, allocate(pool, size)


def managed_pool(rows: int) -> tuple[Any, torch.Tensor]:
    """A pool as the CUDA backend gives it, with random rows uint8 `[rows, WIDTH]`."""
    from baige_device.engines.vllm import cuda_host_pool

    pool, backing = make_pool(rows * WIDTH)
    cuda_host_pool._buffers[backing.data_ptr()].kind = "managed"
    host = backing.view(torch.uint8).view(rows, WIDTH)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    return pool, host


def release(pools: list[torch.Tensor]) -> list[Any]:
    """Calls that reached the host's own function."""
    from baige_device.engines.vllm import cuda_host_pool

    calls: list[Any] = []
    cuda_host_pool.releasing(lambda *args: calls.append(args))([], pools, None)
    return calls


def test_the_hosts_pool_is_our_memory_and_is_given_back_once() -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pool, backing = make_pool(12_345)
    assert backing.dtype == torch.int8
    assert backing.numel() == 12_345
    assert pool.registered is backing
    assert pool.allocate(12_345) is backing  # the host's profiling and its real cache share it
    buffer = cuda_host_pool._buffers[backing.data_ptr()]
    foreign = torch.empty(8)
    pools = [foreign, pool.registered]
    assert release(pools) == [([], pools, None)]
    assert pools == [foreign]  # only that is the host's to unregister
    assert buffer.closed
    assert not cuda_host_pool._buffers


def test_a_pool_that_ranks_share_stays_the_hosts() -> None:
    from vllm.v1.hisparse.runtime import HiSparseHostPool

    from baige_device.engines.vllm import cuda_host_pool

    pool: Any = HiSparseHostPool(SimpleNamespace(), SimpleNamespace(hisparse_shared_host_pool=True))
    allocate = cuda_host_pool.allocating(current().ops, lambda pool, size: ("host's", size))
    assert allocate(pool, 100) == ("host's", 100)
    assert not cuda_host_pool._buffers


@pytest.mark.parametrize("resident", [False, True])
def test_prefill_rows_come_from_the_host_and_from_resident_pages(resident: bool) -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pool, host = managed_pool(40)
    pages = torch.randint(0, 256, (6, BLOCK, WIDTH), dtype=torch.uint8)
    row_ids = torch.tensor([[0, 1, 2, 3, 36, 37, 38, 39, -1, -1, -1, -1]], dtype=torch.int32)
    at_hand = torch.tensor([[-1, -1, -1, -1, 20, 21, 22, 23, -1, -1, -1, -1]], dtype=torch.int32)
    plan = SimpleNamespace(row_ids=row_ids, gpu_row_ids=at_hand if resident else None, block_size=BLOCK)
    staged = cuda_host_pool.staging(current().ops, refuse)(None, host.view(-1, BLOCK, WIDTH), plan, pages)
    assert staged.shape == (3, BLOCK, WIDTH)
    assert torch.equal(staged[0], host[:4])
    assert torch.equal(staged[1], pages[5] if resident else host[36:])
    release([pool.registered])


def test_widening_reads_the_staged_pages_by_the_same_block_table() -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pool, host = managed_pool(40)
    pages, seen = torch.randint(0, 256, (6, BLOCK, WIDTH), dtype=torch.uint8), []
    widen = cuda_host_pool.widening(current().ops, lambda *args, **maps: seen.append((args, maps)))
    out, table, starts = torch.empty(8, 3), torch.tensor([[1, 0]]), torch.tensor([0])
    host_rows = torch.tensor([8, 9, 10, 11, 4, 5, 6, 7], dtype=torch.int32)
    device_rows = torch.tensor([-1, -1, -1, -1, 12, 13, 14, 15], dtype=torch.int32)
    maps = {"host_cache": host, "host_row_ids": host_rows[None], "device_row_ids": device_rows[None]}
    widen(pages, out, table, starts, 1, **maps)
    (got, *rest), given = seen.pop()
    assert rest == [out, table, starts, 1, None]
    assert given == {}
    assert torch.equal(got, torch.stack((host[8:12], pages[3])))
    registered = {**maps, "host_cache": host.clone()}
    widen(pages, out, table, starts, 1, **registered)
    assert seen.pop() == ((pages, out, table, starts, 1, None), registered)
    release([pool.registered])


def test_copies_of_other_memory_are_the_hosts() -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pool, _ = managed_pool(4)
    seen: list[Any] = []
    copy = cuda_host_pool.copying(lambda *args: seen.append(args))
    lists = [torch.tensor([64]), torch.tensor([128]), torch.tensor([8])]
    copy(*lists)
    copy(*[addresses[:0] for addresses in lists])
    assert len(seen) == 2
    assert cuda_host_pool._is_managed(pool.registered.data_ptr() + 4 * WIDTH - 1)
    assert not cuda_host_pool._is_managed(pool.registered.data_ptr() + 4 * WIDTH)
    release([pool.registered])


def refuse(*args: Any) -> None:
    raise AssertionError("the host's function was called")
