"""kv_write: named slots get the rows, everything else keeps its content."""

from __future__ import annotations

import pytest
import torch

from baige_device.errors import ContractError
from baige_device.registry.table import OpTable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_rows_land_in_their_slots(ops: OpTable, dtype: torch.dtype) -> None:
    pool = torch.full((3, 2, 4, 2, 5), 7.0).to(dtype)  # keys and values interleaved by page, here the values
    values = torch.arange(30.0).view(3, 2, 5).to(dtype)
    slots = torch.tensor([9, -1, 0, 11], dtype=torch.int32)  # the last one belongs to graph padding
    ops.kv_write(values, pool[:, 1], slots)
    wanted = torch.full((3, 2, 4, 2, 5), 7.0)
    wanted[2, 1, 1] = values[0].float()
    wanted[0, 1, 0] = values[2].float()
    assert torch.equal(pool.float(), wanted)


def test_converts_between_floating_dtypes(ops: OpTable) -> None:
    cache = torch.zeros(1, 2, 1, 3, dtype=torch.bfloat16)
    values = torch.tensor([[[1.0, 1.00390625, 1.01171875]]])  # ties to even: down, up
    ops.kv_write(values, cache, torch.tensor([1]))
    assert cache[0, 1, 0].tolist() == [1.0, 1.0, 1.015625]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float8_saturates_and_keeps_nan(ops: OpTable, dtype: torch.dtype) -> None:
    cache = torch.zeros(1, 2, 1, 6).to(torch.float8_e4m3fn)
    values = torch.tensor([[[448.0, 480.0, -65000.0, torch.inf, -torch.inf, torch.nan]]], dtype=dtype)
    ops.kv_write(values, cache, torch.tensor([1]))
    assert cache[0, 1, 0, :5].tolist() == [448.0, 448.0, -448.0, 448.0, -448.0]
    assert cache[0, 1, 0, 5].isnan()


def test_wider_floats_overflow_to_infinity(ops: OpTable) -> None:
    cache = torch.zeros(1, 1, 1, 2, dtype=torch.float16)
    ops.kv_write(torch.tensor([[[1e6, -1e6]]]), cache, torch.tensor([0]))
    assert cache.flatten().tolist() == [torch.inf, -torch.inf]


def test_nothing_to_write(ops: OpTable) -> None:
    cache = torch.ones(1, 2, 1, 3)
    ops.kv_write(torch.zeros(0, 1, 3), cache, torch.zeros(0, dtype=torch.int64))
    ops.kv_write(torch.zeros(2, 1, 3), cache, torch.tensor([-1, -1]))
    assert cache.eq(1).all()


def test_slot_outside_the_cache_is_refused(ops: OpTable) -> None:
    with pytest.raises(ContractError, match=r"slots\[0\]: expected -1 or an index in \[0, 2\), got 2"):
        ops.kv_write(torch.zeros(1, 1, 3), torch.ones(1, 2, 1, 3), torch.tensor([2]))


def test_a_slot_named_twice_is_refused_but_not_behind_the_tokens(ops: OpTable) -> None:
    values, cache = torch.zeros(3, 1, 3), torch.ones(2, 2, 1, 3)
    with pytest.raises(ContractError, match=r"slots\[2\]: expected each row named once, got 3 as in slots\[0\]"):
        ops.kv_write(values, cache, torch.tensor([3, -1, 3]))
    assert cache.eq(1).all()
    ops.kv_write(values, cache, torch.tensor([-1, 3, -1, 3, 3]))
    assert cache[1, 1].eq(0).all()
