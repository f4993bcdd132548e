"""uva_sparse_gather and uva_sparse_scatter: exact bytes, counts, -1, strides."""

from __future__ import annotations

import pytest
import torch

from baige_device.errors import ContractError
from baige_device.registry.table import OpTable

POISON = 123


def pool(rows: int, width: int, dtype: torch.dtype, *, random: bool) -> torch.Tensor:
    size = width * dtype.itemsize
    if not random:
        return torch.full((rows, size), POISON, dtype=torch.uint8).view(dtype)
    return torch.randint(0, 256, (rows, size), dtype=torch.uint8).view(dtype)  # includes NaN bit patterns


@pytest.mark.parametrize("width", [1, 7, 132, 656])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("op", ["uva_sparse_gather", "uva_sparse_scatter"])
def test_exact_bytes_zeros_and_untouched_rows(ops: OpTable, op: str, width: int, dtype: torch.dtype) -> None:
    src, dst = pool(6, width, dtype, random=True), pool(5, width, dtype, random=False)
    src_rows, dst_rows = torch.tensor([5, -1, 0, 2, 1], dtype=torch.int32), torch.tensor([3, 0, -1, 2, 4])
    getattr(ops, op)(src, dst, src_rows, dst_rows.int(), torch.tensor([4], dtype=torch.int32))
    wanted = pool(5, width, dtype, random=False).view(torch.uint8)
    wanted[3], wanted[2] = src.view(torch.uint8)[5], src.view(torch.uint8)[2]
    if op == "uva_sparse_gather":
        wanted[0] = 0  # a backup must not do this
    assert torch.equal(dst.view(torch.uint8), wanted)


def test_paged_pools_with_gaps_and_a_plan_by_request(ops: OpTable) -> None:
    src = torch.arange(4 * 3 * 2 * 5.0).view(4, 2, 3, 5)[:, 1]  # rows of one layer of a pool with two
    dst = torch.zeros(2, 4, 8)[..., :5]
    src_rows = torch.tensor([[11, 0, 999], [3, 999, 999], [999, 999, 999]])
    dst_rows = torch.tensor([[0, 7, 999], [4, 999, 999], [999, 999, 999]])
    ops.uva_sparse_gather(src, dst, src_rows, dst_rows, torch.tensor([2, 1, 0], dtype=torch.int32))
    wanted = torch.zeros(2, 4, 5)
    wanted[0, 0], wanted[1, 3], wanted[1, 0] = src[3, 2], src[0, 0], src[1, 0]
    assert torch.equal(dst, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_local_to_a_request_are_moved_by_its_offset(ops: OpTable, dtype: torch.dtype) -> None:
    src, dst = torch.arange(1.0, 7.0)[:, None], torch.full((8, 1), 9.0)
    src_rows, dst_rows = torch.tensor([[0, -1, 5], [3, 4, 0]]), torch.tensor([[2, 0, -1], [1, 0, 3]])
    count = torch.tensor([3, 2], dtype=torch.int32)
    ops.uva_sparse_gather(src, dst, src_rows, dst_rows, count, dst_offsets=torch.tensor([4, 0], dtype=dtype))
    assert dst.flatten().tolist() == [5, 4, 9, 9, 0, 9, 1, 9]
    with pytest.raises(ContractError, match=r"dst_offsets\[0\]: expected dst_rows\[1\] \+ offset in \[0, 8\), got 8"):
        ops.uva_sparse_gather(src, dst, src_rows[0], torch.tensor([2, 3, -1]), dst_offsets=torch.tensor([5]))


def test_empty_plans_and_pools(ops: OpTable) -> None:
    dst = torch.ones(3, 2)
    nothing = torch.zeros(0, dtype=torch.int64)
    ops.uva_sparse_gather(torch.ones(0, 2), dst, nothing, nothing)
    ops.uva_sparse_scatter(torch.ones(0, 2), dst, torch.tensor([-1]), torch.tensor([1]))
    assert dst.eq(1).all()
    ops.uva_sparse_gather(torch.ones(0, 2), dst, torch.tensor([-1]), torch.tensor([1]))
    assert dst.tolist() == [[1, 1], [0, 0], [1, 1]]


def test_row_outside_a_pool_is_refused_but_not_behind_the_count(ops: OpTable) -> None:
    src, dst, rows = torch.ones(2, 2), torch.zeros(2, 2), torch.tensor([0, 2])
    with pytest.raises(ContractError, match=r"src_rows\[1\]: expected -1 or an index in \[0, 2\), got 2"):
        ops.uva_sparse_gather(src, dst, rows, torch.tensor([0, 1]))
    ops.uva_sparse_gather(src, dst, rows, torch.tensor([0, 1]), torch.tensor([1], dtype=torch.int32))
    assert dst.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("op", ["uva_sparse_gather", "uva_sparse_scatter"])
def test_a_destination_named_twice_is_refused_but_not_behind_the_count(ops: OpTable, op: str) -> None:
    src, dst, sources = torch.ones(4, 2), torch.zeros(4, 2), torch.tensor([[0, 1], [2, 3]])
    twice = torch.tensor([[3, -1], [0, 3]])
    with pytest.raises(
        ContractError, match=r"dst_rows\[1, 1\]: expected each row named once, got 3 as in dst_rows\[0, 0\]"
    ):
        getattr(ops, op)(src, dst, sources, twice)
    assert not dst.any()
    getattr(ops, op)(src, dst, sources, twice, torch.tensor([2, 1], dtype=torch.int32))
    assert dst[:, 0].tolist() == [1, 0, 0, 1]


def test_local_slots_may_be_equal_where_their_offsets_differ(ops: OpTable) -> None:
    src, dst, rows = torch.ones(2, 2), torch.zeros(4, 2), torch.tensor([[0, 1], [0, 1]])
    ops.uva_sparse_gather(src, dst, rows, rows, dst_offsets=torch.tensor([0, 2]))
    assert dst.eq(1).all()
    with pytest.raises(
        ContractError, match=r"dst_rows\[1, 0\]: expected each row named once, got 1 as in dst_rows\[0, 1\]"
    ):
        ops.uva_sparse_gather(src, dst, rows, rows, dst_offsets=torch.tensor([0, 1]))


def test_a_zeroed_row_counts_in_a_gather_and_a_skipped_one_not_in_a_scatter(ops: OpTable) -> None:
    src, dst, sources, twice = torch.ones(2, 2), torch.zeros(2, 2), torch.tensor([0, -1]), torch.tensor([1, 1])
    with pytest.raises(ContractError, match=r"dst_rows\[1\]: expected each row named once"):
        ops.uva_sparse_gather(src, dst, sources, twice)
    ops.uva_sparse_scatter(src, dst, sources, twice)
    assert dst[:, 0].tolist() == [0, 1]
