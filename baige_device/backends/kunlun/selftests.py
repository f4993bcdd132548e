"""Self-tests of vendor kernels whose behaviour is inferred, against plain torch: small, fixed, once a process."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baige_device.backends.kunlun import (
    attend,
    gather_memcpy,
    gather_transfer,
    index,
    index_portable,
    kv_write,
    moe_sort,
    rows,
    sparse,
    sparse_portable,
    vendor,
)
from baige_device.backends.kunlun.host_alloc import host_alloc as allocate
from baige_device.backends.kunlun.limits import SPARSE_DECODE_ROWS
from baige_device.backends.kunlun.open_questions import Answer
from baige_device.registry.offers import DeviceInfo

__all__ = [
    "cache_write_skips",
    "host_pointer_copy",
    "host_register",
    "index_order",
    "moe_order",
    "sparse_lists",
    "transfer_row_granularity",
    "window_counts_self",
]

_ROW_BYTES = (16, 132, 656, 1152)
"""A vector word, an index row with its scale, a DeepSeek-V3.2 fp8 row, and a 576-column bf16 latent row."""


def host_register(device: DeviceInfo) -> Answer:
    """Register and release 4 MiB."""
    with allocate(1 << 22) as buffer:
        zero = not bool(buffer.tensor.any())
    return Answer(zero, "4 MiB registered" if zero else "registered memory is not zero-filled")


def host_pointer_copy(device: DeviceInfo) -> Answer:
    """Odd row sizes, holes and a count, host to device and back."""
    for width in _ROW_BYTES:
        with allocate(32 * width) as buffer:
            host = buffer.tensor.view(32, width)
            host.copy_(_bytes(32, width, seed=width))
            pool = torch.full((16, width), 7, dtype=torch.uint8, device=device.torch_device)
            source = torch.tensor([5, -1, 31, 0, 9], dtype=torch.int32, device=device.torch_device)
            target = torch.tensor([2, 3, 15, -1, 4], dtype=torch.int32, device=device.torch_device)
            count = torch.tensor([4], dtype=torch.int32, device=device.torch_device)
            gather_memcpy.uva_sparse_gather(host, pool, source, target, count)
            want = torch.full((16, width), 7, dtype=torch.uint8, device="cpu")
            want[2], want[3], want[15] = host[5], 0, host[31]
            if not torch.equal(pool.cpu(), want):
                return Answer(False, f"rows of {width} bytes arrive wrong")
            gather_memcpy.uva_sparse_scatter(pool, host, target, source, count)
            _synchronise(device)
            if not torch.equal(host[31], want[15]):
                return Answer(False, f"rows of {width} bytes go back wrong")
    return Answer(True, f"rows of {list(_ROW_BYTES)} bytes move exactly, size 0 moves nothing")


def transfer_row_granularity(device: DeviceInfo) -> Answer:
    """Which of the row sizes the page transfer moves exactly."""
    problems = {width: _transfer_problem(device, width) for width in _ROW_BYTES}
    sizes = tuple(width for width, problem in problems.items() if not problem)
    detail = f"rows of {list(sizes)} bytes move exactly"
    failed = next((width for width, problem in problems.items() if problem), None)
    if failed is not None:
        detail += f"; {failed} bytes: {problems[failed]}"
    return Answer(bool(sizes), detail, sizes)


def _transfer_problem(device: DeviceInfo, width: int) -> str:
    with allocate(32 * width) as buffer:
        host = buffer.tensor.view(32, width)
        host.copy_(_bytes(32, width, seed=width))
        pool = torch.zeros(16, width, dtype=torch.uint8, device=device.torch_device)
        source = torch.tensor([5, 31, 0], dtype=torch.int64, device=device.torch_device)
        target = torch.tensor([2, 15, 4], dtype=torch.int64, device=device.torch_device)
        want = torch.zeros(16, width, dtype=torch.uint8, device="cpu")
        want[[2, 15, 4]] = host[[5, 31, 0]]
        try:
            gather_transfer.uva_sparse_gather(host, pool, source, target)
            _synchronise(device)
        except Exception as error:  # a size that the kernel refuses is an answer
            return f"{type(error).__name__}: {error}"
    return "" if torch.equal(pool.cpu(), want) else "bytes arrive wrong"


def sparse_lists(device: DeviceInfo) -> Answer:
    """A pool smaller than the list, holes anywhere, the last row named first: both kernels against plain torch."""
    for tokens in (3, SPARSE_DECODE_ROWS.value + 1):
        q = _noise(tokens, 8, 576, seed=tokens).to(device.torch_device, torch.bfloat16)
        pool = _noise(40, 1, 576, seed=2).to(device.torch_device, torch.bfloat16)
        lists = torch.full((tokens, 1, 128), -1, dtype=torch.int32, device="cpu")
        for token in range(tokens):
            chosen = torch.randperm(40, generator=torch.Generator().manual_seed(token))[:9]
            lists[token, 0, 3 + token % 64 :: 7][:9] = chosen.int()
        lists[0, 0, :2] = torch.tensor([39, -1], dtype=torch.int32)
        lists[0, 0, 2:] = -1
        lists = lists.to(device.torch_device)
        ours = sparse.sparse_attention(q, pool, None, lists, scale=0.05, v_dim=512)
        plain = sparse_portable.sparse_attention(q, pool, None, lists, scale=0.05, v_dim=512)
        problem = _difference(ours, plain)
        if problem:
            return Answer(False, f"{tokens} queries: {problem}")
    return Answer(True, "lists decide alone: holes, short pools and the last row behave")


def window_counts_self(device: DeviceInfo) -> Answer:
    """Two requests, one with a prefix, heads unlike tokens, with and without a window, pages and gathered keys."""
    lens, queries, heads, size = [70, 5], [3, 5], 4, 64
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32, device=device.torch_device)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32, device=device.torch_device)
    q = _noise(8, heads, size, seed=1).to(device.torch_device, torch.bfloat16)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device.torch_device)
    for groups in (1, 2):
        k = _noise(3, 64, groups, size, seed=2).to(device.torch_device, torch.bfloat16)
        v = _noise(3, 64, groups, size, seed=3).to(device.torch_device, torch.bfloat16)
        for window in (0, 4):
            ours = attend.attend_paged(q, k, v, table, starts, lengths, scale=0.2, window=window)
            lists = _window_lists(table, lens, queries, window, groups).to(device.torch_device)
            plain = sparse_portable.sparse_attention(q, k, v, lists, scale=0.2)
            problem = _difference(ours, plain)
            if problem:
                return Answer(False, f"window {window}, {groups} kv heads: {problem}")
    return Answer(True, "swa_left excludes the query itself; LSE is natural, [tokens, heads]")


def _window_lists(table: Tensor, lens: list[int], queries: list[int], window: int, groups: int) -> Tensor:
    lists = torch.full((sum(queries), groups, max(lens)), -1, dtype=torch.int64, device="cpu")
    token, pages = 0, table.tolist()
    for row, length in enumerate(lens):
        for position in range(length - queries[row], length):
            first = max(0, position - window + 1) if window else 0
            seen = [pages[row][at // 64] * 64 + at % 64 for at in range(first, position + 1)]
            lists[token, :, : len(seen)] = torch.tensor(seen)
            token += 1
    return lists


def cache_write_skips(device: DeviceInfo) -> Answer:
    """Both cache kernels against an indexed write, with holes and two heads."""
    slots = torch.tensor([7, -1, 64, 130], dtype=torch.int64, device=device.torch_device)
    for groups, width in ((1, 576), (2, 128), (1, 128)):
        new = _noise(4, groups, width, seed=width).to(device.torch_device, torch.bfloat16)
        ours = torch.full((3, 64, groups, width), 3.0, dtype=torch.bfloat16, device=device.torch_device)
        plain = ours.clone()
        kv_write.kv_write(new, ours, slots)
        rows.put_rows(plain, slots, new)
        if not torch.equal(ours.cpu(), plain.cpu()):
            return Answer(False, f"{groups} heads of {width}: rows land elsewhere than their slots")
    return Answer(True, "slot -1 writes nothing; pages are [tokens, heads, columns]")


def index_order(device: DeviceInfo) -> Answer:
    """Decode and prefill against plain torch: equal sets of positions on well separated scores, strided keys."""
    for queries in (1, 4):
        lens = [70, 64, 9]
        tokens = queries * len(lens)
        q = _levels(tokens, 4, 128, seed=1).to(device.torch_device)
        fused = _levels(6, 64, 132, seed=2).to(device.torch_device)
        scales = (_noise(6, 64, seed=3).abs() + 0.5).to(device.torch_device)
        weights = _noise(tokens, 4, seed=4).to(device.torch_device)
        table = torch.tensor([[5, 1], [2, 0], [3, 3]], dtype=torch.int32, device=device.torch_device)
        starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device.torch_device)
        lengths = torch.tensor(lens, dtype=torch.int32, device=device.torch_device)
        topk = 16 if vendor.has("xspeedgate_ops.topk_per_row") else 2048
        args = (q, weights, fused[..., :128], table, starts, lengths)
        ours = index.index_topk(*args, topk=topk, k_scales=scales)
        plain = index_portable.index_topk(*args, topk=topk, k_scales=scales)
        if not torch.equal(ours.cpu().sort(1).values, plain.cpu().sort(1).values):
            return Answer(False, f"{queries} queries a request: other positions than plain torch")
    return Answer(True, "same positions as plain torch")


def moe_order(device: DeviceInfo) -> Answer:
    """Both permutations: rows by expert, tokens in order, choices of -1 behind."""
    for tokens in (5, 500):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, 7, generator=generator).argsort(1)[:, :2].int() - 1
        x = _noise(tokens, 64, seed=tokens).to(device.torch_device, torch.float16)
        got = moe_sort.sort_by_expert(x, ids.to(device.torch_device), 6)
        flat = torch.where(ids >= 0, ids, 6).flatten()
        order = flat.argsort(stable=True)
        want = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).view_as(ids)
        starts = torch.bincount(flat, minlength=7).cumsum(0)
        live = got.rows[: int(starts[5])].cpu()
        if not torch.equal(got.row_of.cpu().long()[ids >= 0], want[ids >= 0]):
            return Answer(False, f"{tokens} tokens: rows are not in token order within an expert")
        moved = torch.equal(live, x.cpu()[order // 2][: len(live)])
        if got.starts.cpu().tolist() != [0, *starts[:6].tolist()] or not moved:
            return Answer(False, f"{tokens} tokens: rows or offsets are wrong")
    return Answer(True, "token order kept within an expert; one more expert is fine")


def _difference(ours: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> str:
    for name, left, right, limit in (("out", ours[0], plain[0], 0.03), ("lse", ours[1], plain[1], 0.01)):
        a, b = left.double().cpu(), right.double().cpu()
        gap = torch.where(a == b, 0.0, (a - b).abs() / (1 + b.abs()))
        worst = float(torch.where(gap.isnan(), math.inf, gap).max())
        if worst > limit:
            return f"{name} differs by {worst:.3g} (limit {limit})"
    return ""


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _levels(*shape: int, seed: int) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def _bytes(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def _synchronise(device: DeviceInfo) -> None:
    if device.torch_device == "cuda":
        torch.cuda.synchronize()
