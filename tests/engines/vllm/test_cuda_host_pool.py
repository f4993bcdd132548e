"""HiSparse's host pool from `host_alloc` in vLLM's own pool object, on CPU with the reference ops."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.activation import current
from baige_device.ops.host_alloc.contract import HostBuffer

pytestmark = pytest.mark.usefixtures("reference")

BLOCK, WIDTH = 4, 16


def make_pool(size: int, kind: Any = "managed") -> tuple[Any, torch.Tensor, HostBuffer]:
    """vLLM's pool object after `allocate`, its memory, and the buffer that `host_alloc` gave."""
    from vllm.v1.hisparse.runtime import HiSparseHostPool

    from baige_device.engines.vllm import cuda_host_pool

    buffer = HostBuffer(torch.zeros(size, dtype=torch.uint8), kind)
    ops: Any = SimpleNamespace(host_alloc=lambda asked: buffer if asked == size else refuse())
    pool: Any = HiSparseHostPool(SimpleNamespace(), SimpleNamespace(hisparse_shared_host_pool=False))
    original: Any = HiSparseHostPool.allocate if kind == "managed" else lambda pool, size: torch.ones(1)
    return pool, cuda_host_pool.allocating(ops, original)(pool, size), buffer


def random_pool(rows: int) -> tuple[Any, torch.Tensor]:
    """A pool of ours with random rows uint8 `[rows, WIDTH]`."""
    pool, backing, _ = make_pool(rows * WIDTH)
    host = backing.view(torch.uint8).view(rows, WIDTH)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    return pool, host


def release(pools: list[torch.Tensor], original: Any = lambda *args: None) -> None:
    from baige_device.engines.vllm import cuda_host_pool

    cuda_host_pool.releasing(original)([], pools, None)


def test_the_hosts_pool_is_our_memory_and_is_given_back_once() -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pool, backing, buffer = make_pool(12_345)
    assert backing.dtype == torch.int8
    assert backing.data_ptr() == buffer.tensor.data_ptr()
    assert pool.registered is backing
    assert pool.allocate(12_345) is backing  # the host's profiling and its real cache share it
    foreign, calls = torch.empty(8), []
    pools = [foreign, pool.registered]
    release(pools, lambda *args: calls.append(args))
    assert calls == [([], pools, None)]
    assert pools == [foreign]  # only that is the host's to unregister
    assert buffer.closed
    assert not cuda_host_pool._buffers


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_memory_that_is_no_better_than_the_hosts_is_given_back_at_once(kind: str) -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pool, got, buffer = make_pool(64, kind)
    assert torch.equal(got, torch.ones(1))  # the host's own
    assert buffer.closed
    assert pool.registered is None
    assert not cuda_host_pool._buffers


def test_a_pool_that_ranks_share_stays_the_hosts() -> None:
    from vllm.v1.hisparse.runtime import HiSparseHostPool

    from baige_device.engines.vllm import cuda_host_pool

    pool: Any = HiSparseHostPool(SimpleNamespace(), SimpleNamespace(hisparse_shared_host_pool=True))
    allocate = cuda_host_pool.allocating(current().ops, lambda pool, size: ("host's", size))
    assert allocate(pool, 100) == ("host's", 100)
    assert not cuda_host_pool._buffers


def test_the_hosts_memory_check_comes_first() -> None:
    from baige_device.engines.vllm import cuda_host_pool

    ops: Any = SimpleNamespace(host_alloc=refuse)
    pool = SimpleNamespace(backing=None, kv_cache_config=SimpleNamespace(hisparse_shared_host_pool=False))
    with pytest.raises(ValueError, match="host_pool_gib"):
        cuda_host_pool.allocating(ops, refuse)(pool, 1 << 60)


@pytest.mark.parametrize(
    ("kind", "connector", "ours"),
    [
        ("managed", "HiSparseConnector", True),
        ("pinned", "HiSparseConnector", False),
        ("managed", "MultiConnector", False),
    ],
)
def test_the_pool_is_ours_where_it_is_managed_and_nobody_else_registers_it(
    kind: str, connector: str, ours: bool
) -> None:
    from baige_device.engines.vllm.cuda_host_pool import serves_pool

    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=connector))
    chosen: Any = SimpleNamespace(offer=SimpleNamespace(facts={"kind": kind}))
    assert serves_pool(config, chosen) is ours
    assert serves_pool(config, None) is False


def test_a_failing_release_of_the_host_or_of_ours_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    from baige_device.engines.vllm import cuda_host_pool

    def fail(*args: Any) -> None:
        raise AttributeError("planted")

    pool, _, buffer = make_pool(64)
    with pytest.raises(AttributeError, match="planted"):
        release([pool.registered], fail)
    assert buffer.closed
    pool, _, buffer = make_pool(64)

    def unusable() -> None:
        raise RuntimeError("planted: context is gone")

    buffer.release = unusable
    release([pool.registered])
    assert "context is gone" in caplog.text
    assert not cuda_host_pool._buffers


@pytest.mark.parametrize("resident", [False, True])
def test_prefill_rows_come_from_the_host_and_from_resident_pages(resident: bool) -> None:
    from vllm.v1.hisparse import runtime

    from baige_device.engines.vllm import cuda_host_pool

    pool, host = random_pool(40)
    pages = torch.randint(0, 256, (6, BLOCK, WIDTH), dtype=torch.uint8)
    row_ids = torch.tensor([[0, 1, 2, 3, 36, 37, 38, 39, -1, -1, -1, -1]], dtype=torch.int32)
    at_hand = torch.tensor([[-1, -1, -1, -1, 20, 21, 22, 23, -1, -1, -1, -1]], dtype=torch.int32)
    plan = SimpleNamespace(row_ids=row_ids, gpu_row_ids=at_hand if resident else None, block_size=BLOCK)
    gather = cuda_host_pool.staging(current().ops, refuse)
    staged = gather(None, host.view(-1, BLOCK, WIDTH), plan, pages.view(torch.int8))
    assert staged.shape == (3, BLOCK, WIDTH)
    assert staged.untyped_storage().nbytes() >= runtime._MIN_STAGED_PREFILL_KV_ROWS * WIDTH
    assert torch.equal(staged[0], host[:4])
    assert torch.equal(staged[1], pages[5] if resident else host[36:])
    release([pool.registered])


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_widening_stages_the_pages_of_its_own_requests(chunks: int) -> None:
    """A prefill of four requests in chunks: the host's table and row lists name the pages of all of them."""
    from baige_device.engines.vllm import cuda_host_pool

    torch.manual_seed(chunks)
    pool, host = random_pool(400)
    pages = torch.randint(0, 256, (20, BLOCK, WIDTH), dtype=torch.uint8)
    lengths, columns, num_pages = [5, 16, 1, 9], 6, 12
    table, fresh = torch.zeros(4, columns, dtype=torch.int32), iter(range(1, num_pages))
    for request, length in enumerate(lengths):
        for column in range(-(-length // BLOCK)):
            table[request, column] = next(fresh)
    table[3, 0] = table[1, 0]  # a shared prefix
    offsets = torch.arange(BLOCK)
    host_rows = (torch.randperm(100)[:num_pages, None] * BLOCK + offsets).int().view(1, -1)
    at_hand = torch.rand(num_pages) < 0.4
    device_rows = torch.where(at_hand[:, None], torch.randperm(20)[:num_pages, None] * BLOCK + offsets, -1).int()
    step, copied = 4 // chunks, 0

    def gather(src: Any, dst: Any, src_rows: Any, dst_rows: torch.Tensor, **options: Any) -> None:
        nonlocal copied
        copied += int((dst_rows >= 0).sum())
        current().ops.uva_sparse_gather(src, dst, src_rows, dst_rows, **options)

    ops: Any = SimpleNamespace(uva_sparse_gather=gather)
    for first in range(0, 4, step):
        mine = slice(first, first + step)
        tokens = sum(lengths[mine])
        out, starts = torch.empty(tokens, 3), torch.tensor([0, *lengths[mine]]).cumsum(0)[:-1]
        seen: list[Any] = []
        widen, copied = cuda_host_pool.widening(ops, lambda *args, seen=seen: seen.append(args)), 0
        maps = {"host_cache": host, "host_row_ids": host_rows, "device_row_ids": device_rows.view(1, -1)}
        widen(pages, out, table[mine], starts, step, **maps)
        ((got, dst, local, *rest),) = seen
        assert dst is out
        assert rest == [starts, step, None]
        assert len(got) <= tokens // BLOCK + step + 1
        assert copied == table[mine].unique().numel() * BLOCK
        for request in range(step):
            for position in range(lengths[first + request]):
                page = int(table[first + request, position // BLOCK])
                row = page * BLOCK + position % BLOCK
                resident = int(device_rows.flatten()[row])
                want = pages.view(-1, WIDTH)[resident] if resident >= 0 else host[host_rows[0, row]]
                assert torch.equal(got[local[request, position // BLOCK], position % BLOCK], want)
    release([pool.registered])


def test_widening_of_other_memory_is_the_hosts() -> None:
    from baige_device.engines.vllm import cuda_host_pool

    pages, seen = torch.zeros(6, BLOCK, WIDTH, dtype=torch.uint8), []
    widen = cuda_host_pool.widening(current().ops, lambda *args, **maps: seen.append((args, maps)))
    out, table, starts = torch.empty(8, 3), torch.tensor([[1, 0]]), torch.tensor([0])
    rows = torch.zeros(1, 8, dtype=torch.int32)
    maps = {"host_cache": torch.zeros(40, WIDTH, dtype=torch.uint8), "host_row_ids": rows, "device_row_ids": rows}
    widen(pages, out, table, starts, 1, **maps)
    assert seen.pop() == ((pages, out, table, starts, 1, None), maps)


@pytest.mark.parametrize("to_host", [True, False])
def test_copies_of_our_pool_keep_their_direction_and_others_are_the_hosts(
    to_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baige_device.engines.vllm import cuda_host_pool

    def copy_now(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(cuda_host_pool, "on_device", lambda *lists: lists)
    monkeypatch.setattr(cuda_host_pool, "launch_copies", copy_now)
    pool, host = random_pool(8)
    device, seen = torch.randint(0, 256, (8, WIDTH), dtype=torch.uint8), []
    source, target = (device, host) if to_host else (host, device)
    want = target.clone()
    want[5:7], want[1] = source[2:4], source[7]
    copy = cuda_host_pool.copying(lambda *args: seen.append(args))
    copy(addresses(source, 2, 7), addresses(target, 5, 1), torch.tensor([2 * WIDTH, WIDTH]))
    assert torch.equal(target, want)
    foreign = (addresses(device, 0), addresses(torch.empty_like(device), 0), torch.tensor([WIDTH]), True)
    copy(*foreign)
    copy(*[tensor[:0] for tensor in foreign[:3]])
    assert len(seen) == 2
    assert seen[0] == foreign
    release([pool.registered])


def addresses(rows: torch.Tensor, *chosen: int) -> torch.Tensor:
    return torch.tensor([rows[row].data_ptr() for row in chosen])


def refuse(*args: Any) -> Any:
    raise AssertionError("this was not to be called")
