"""Row gather and scatter on the GPU, against indexing on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baige_device.backends.cuda import gather
from baige_device.backends.cuda.gather import uva_sparse_gather, uva_sparse_scatter
from baige_device.backends.cuda.host_memory import host_alloc
from baige_device.errors import ContractError
from tests.device.gpu import captured, needs_gpu

pytestmark = [needs_gpu, pytest.mark.device]

WIDTHS = [1, 3, 15, 16, 100, 512, 576, 584, 650, 652, 656, 1152, 2048, 4100, 16384]


@pytest.fixture(scope="module")
def arena() -> Iterator[Tensor]:
    """64 MiB of host memory with random bytes."""
    with host_alloc(64 << 20) as buffer:
        buffer.tensor.copy_(torch.randint(0, 256, (64 << 20,), dtype=torch.uint8))
        yield buffer.tensor


def pools(arena: Tensor, width: int, layout: str, rows: int = 700) -> tuple[Tensor, Tensor]:
    """A host pool in the arena and a poisoned device pool of the same kind, `rows` rows each."""
    pad = {"dense": 0, "padded": 24, "aligned": -width % 16, "paged": 0, "odd": 0}[layout]
    offset = 1 if layout == "odd" else 0
    stride = width + pad
    host = arena[offset : offset + rows * stride]
    device = torch.full((offset + rows * stride,), 0xA5, dtype=torch.uint8, device="cuda")[offset:]
    if layout == "paged":
        return host.view(rows // 7, 7, width), device.view(rows // 7, 7, width)
    return host.view(rows, stride)[:, :width], device.view(rows, stride)[:, :width]


def rows_of(arena: Tensor, width: int) -> Tensor:
    return arena[: arena.numel() // width * width].view(-1, width)


def flat(pool: Tensor) -> Tensor:
    return pool.cpu().reshape(-1, pool.shape[-1]).clone()


def plan(entries: int, rows: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    src = torch.randint(-1, rows, (entries,), generator=generator)
    dst = torch.randperm(rows, generator=generator)[:entries]
    dst[::11] = -1
    return src.to(dtype), dst.to(dtype)


def expected_gather(src: Tensor, dst: Tensor, src_rows: Tensor, dst_rows: Tensor) -> Tensor:
    want = dst.clone()
    for s, d in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
        if d >= 0:
            want[d] = src[s] if s >= 0 else 0
    return want


@pytest.mark.parametrize("layout", ["dense", "padded", "aligned", "paged", "odd"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_copies_exactly(arena: Tensor, width: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(width)
    host, device = pools(arena, width, layout)
    src_rows, dst_rows = plan(600, 700, torch.int32, generator)
    want = expected_gather(flat(host), flat(device), src_rows, dst_rows)
    uva_sparse_gather(host, device, src_rows.cuda(), dst_rows.cuda())
    assert torch.equal(flat(device), want)


@pytest.mark.parametrize("layout", ["dense", "padded", "paged", "odd"])
@pytest.mark.parametrize("width", WIDTHS)
def test_scatter_copies_exactly_and_never_overwrites_with_zeros(arena: Tensor, width: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(width)
    host, device = pools(arena, width, layout)
    device.copy_(torch.randint(0, 256, device.shape, dtype=torch.uint8))
    src_rows, dst_rows = plan(600, 700, torch.int64, generator)
    want = flat(host)
    source = flat(device)
    for s, d in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
        if s >= 0 and d >= 0:
            want[d] = source[s]
    uva_sparse_scatter(device, host, src_rows.cuda(), dst_rows.cuda())
    torch.cuda.synchronize()
    assert torch.equal(flat(host), want)


@pytest.mark.parametrize("requests", [1, 3, 128, 1025, 2500])
@pytest.mark.parametrize("max_sms", [0, 1, 5])
def test_counts_by_request_bound_what_is_read(arena: Tensor, requests: int, max_sms: int) -> None:
    generator = torch.Generator().manual_seed(requests)
    longest = 40
    host = rows_of(arena, 656)
    device = torch.full((requests * longest, 656), 0xA5, dtype=torch.uint8, device="cuda")
    counts = torch.randint(0, longest + 1, (requests,), generator=generator, dtype=torch.int32)
    counts[0], counts[-1] = 0, longest
    src_rows = torch.randint(0, host.shape[0], (requests, longest), generator=generator)
    dst_rows = torch.arange(requests * longest).view(requests, longest)
    live = torch.arange(longest) < counts[:, None]
    # Entries behind the count would fault if they were read.
    src_rows[~live] = 1 << 40
    want = flat(device)
    want[dst_rows[live]] = host[src_rows[live]]
    uva_sparse_gather(host, device, src_rows.cuda(), dst_rows.int().cuda(), counts.cuda(), max_sms=max_sms)
    assert torch.equal(flat(device), want)


@pytest.mark.parametrize("blocks", [1, 5, 8, 9])
@pytest.mark.parametrize("graph", [False, True])
def test_blocks_of_one_cluster_copy_exactly(
    arena: Tensor, blocks: int, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_LARGE_POOL_BYTES", 0)
    monkeypatch.setattr(gather, "default_sms", lambda pool_bytes: blocks)
    generator = torch.Generator().manual_seed(blocks)
    host, device = pools(arena, 656, "dense")
    src_rows, dst_rows = plan(600, 700, torch.int32, generator)
    want = expected_gather(flat(host), flat(device), src_rows, dst_rows)
    on_device = src_rows.cuda(), dst_rows.cuda()
    if graph:
        captured(lambda: uva_sparse_gather(host, device, *on_device)).replay()
    else:
        uva_sparse_gather(host, device, *on_device)
    assert torch.equal(flat(device), want)


@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counted", [False, True])
def test_offsets_move_each_request_to_its_part(arena: Tensor, offset_dtype: torch.dtype, counted: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    requests, entries, part = 9, 33, 64
    host = rows_of(arena, 656)
    device = torch.full((requests * part, 656), 0xA5, dtype=torch.uint8, device="cuda")
    src_rows = torch.randint(-1, host.shape[0], (requests, entries), generator=generator)
    slots = torch.stack([torch.randperm(part, generator=generator)[:entries] for _ in range(requests)])
    slots[:, ::7] = -1
    offsets = torch.randperm(requests, generator=generator) * part
    counts = torch.randint(0, entries + 1, (requests,), generator=generator, dtype=torch.int32)
    live = torch.arange(entries) < counts[:, None] if counted else torch.ones(requests, entries, dtype=torch.bool)
    targets = torch.where(slots < 0, -1, slots + offsets[:, None])
    want = expected_gather(host, flat(device), src_rows[live], targets[live])
    count = counts.cuda() if counted else None
    uva_sparse_gather(
        host, device, src_rows.int().cuda(), slots.int().cuda(), count, dst_offsets=offsets.to(offset_dtype).cuda()
    )
    assert torch.equal(flat(device), want)


def test_a_flat_plan_has_one_offset(arena: Tensor) -> None:
    host = rows_of(arena, 656)
    device = torch.full((40, 656), 0xA5, dtype=torch.uint8, device="cuda")
    rows = torch.arange(20, device="cuda")
    uva_sparse_gather(host, device, rows, rows.flip(0), dst_offsets=torch.tensor([20], device="cuda"))
    assert torch.equal(device[20:].cpu(), host[:20].flip(0))
    assert bool((device[:20] == 0xA5).all())


def test_graph_replays_follow_the_device_resident_count(arena: Tensor) -> None:
    host = rows_of(arena, 656)[:1000]
    device = torch.empty(500, 656, dtype=torch.uint8, device="cuda")
    src_rows = torch.randperm(1000)[:500].int().cuda()
    dst_rows = torch.arange(500, dtype=torch.int32, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = captured(lambda: uva_sparse_gather(host, device, src_rows, dst_rows, count))
    for live in (0, 1, 499, 500, 33):
        device.fill_(0xA5)
        count.fill_(live)
        src_rows.copy_(torch.randperm(1000)[:500])
        graph.replay()
        want = torch.full((500, 656), 0xA5, dtype=torch.uint8)
        want[:live] = host[src_rows.cpu().long()][:live]
        assert torch.equal(device.cpu(), want)


def test_offsets_beyond_two_to_the_31(arena: Tensor) -> None:
    rows = (5 << 30) // 1152
    device = torch.zeros(rows, 1152, dtype=torch.uint8, device="cuda")
    host = arena[: 1152 * 4].view(4, 1152)
    wanted = [rows - 1, rows // 2, (1 << 31) // 1152 + 1]
    dst_rows = torch.tensor(wanted, dtype=torch.int32, device="cuda")
    uva_sparse_gather(host, device, torch.tensor([3, 0, 2], dtype=torch.int32, device="cuda"), dst_rows)
    assert torch.equal(device[wanted].cpu(), host[[3, 0, 2]])
    assert int(device.count_nonzero(1).gt(0).sum()) == 3


def test_two_streams_at_once(arena: Tensor) -> None:
    host = rows_of(arena, 656)
    outs = [torch.empty(4096, 656, dtype=torch.uint8, device="cuda") for _ in range(2)]
    plans = [torch.randint(0, host.shape[0], (4096,), device="cuda") for _ in range(2)]
    slots = torch.arange(4096, device="cuda")
    torch.cuda.synchronize()
    for out, rows, stream in zip(outs, plans, [torch.cuda.Stream(), torch.cuda.Stream()], strict=True):
        with torch.cuda.stream(stream):
            uva_sparse_gather(host, out, rows, slots)
    torch.cuda.synchronize()
    for out, rows in zip(outs, plans, strict=True):
        assert torch.equal(out.cpu(), host[rows.cpu()])


def test_typed_rows_and_empty_plans(arena: Tensor) -> None:
    host = arena[: 576 * 2 * 100].view(torch.bfloat16).view(100, 576)
    device = torch.zeros(100, 576, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(99, -1, -1, device="cuda")
    uva_sparse_gather(host, device, rows, torch.arange(100, device="cuda"))
    assert torch.equal(device.cpu().view(torch.int16), host.flip(0).view(torch.int16))
    uva_sparse_gather(host, device, rows[:0], rows[:0])


def test_unregistered_memory_is_refused() -> None:
    device = torch.zeros(4, 16, dtype=torch.uint8, device="cuda")
    rows = torch.arange(4, device="cuda")
    with pytest.raises(ContractError, match="uva_sparse_gather: src: expected host memory from host_alloc"):
        uva_sparse_gather(torch.zeros(4, 16, dtype=torch.uint8), device, rows, rows)
