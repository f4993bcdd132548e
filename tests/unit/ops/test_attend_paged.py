"""attend_paged against a float64 oracle: ragged batches, GQA and MLA, windows, poisoned pools and outputs."""

from __future__ import annotations

import math

import pytest
import torch

from baige_device.errors import ContractError
from baige_device.registry.table import OpTable
from tests.unit.ops.attention_oracle import TOLERANCE, expected_paged

NAN = math.nan


def make_batch(lengths, queries, *, heads=4, groups=2, dim=8, page=4, dtype=torch.float32, index=torch.int32):
    """A batch whose pool is NaN wherever no token of the batch lives; two graph-padding rows at the end."""
    blocks = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(blocks) + 3)
    pool = torch.full((len(pages), 2, page, groups, dim), NAN, dtype=dtype)  # keys and values interleaved by page
    table = torch.full((len(lengths), max([*blocks, 1])), 10**6, dtype=index)
    for b, length in enumerate(lengths):
        table[b, : blocks[b]] = pages[sum(blocks[:b]) : sum(blocks[: b + 1])]
        for s in range(length):
            pool[int(table[b, s // page]), :, s % page] = torch.randn(2, groups, dim)
    starts = torch.tensor([sum(queries[:b]) for b in range(len(queries) + 1)], dtype=index)
    q = torch.randn(sum(queries) + 2, heads, dim).to(dtype)
    return q, pool[:, 0], pool[:, 1], table, starts, torch.tensor(lengths, dtype=index)


def assert_attends(ops: OpTable, batch, **options) -> None:
    q, _, v, *_ = batch
    cap = options.get("logits_soft_cap", 0)
    width = options.get("v_dim", 0) if v is None else v.shape[3]
    wanted = {name: value for name, value in options.items() if name != "logits_soft_cap"}
    out, lse = expected_paged(*batch, scale=0.3, cap=cap, **wanted)
    got_out = torch.full((q.shape[0], q.shape[1], width + 3), 123456.0).to(q.dtype)[..., :width]
    got_lse = torch.full(q.shape[:2], 123456.0)
    ops.attend_paged(*batch, scale=0.3, out=got_out, lse=got_lse, **options)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(got_out.double(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-4, atol=1e-4)
    fresh_out, fresh_lse = ops.attend_paged(*batch, scale=0.3, **options)
    assert fresh_out.is_contiguous()
    assert torch.equal(fresh_out, got_out)
    assert torch.equal(fresh_lse, got_lse)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}, {"logits_soft_cap": 0.5}])
def test_mixed_batch(ops: OpTable, dtype: torch.dtype, options: dict[str, float]) -> None:
    assert_attends(ops, make_batch([9, 1, 0, 8, 5], [9, 1, 0, 3, 1], dtype=dtype), **options)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 6), (6, 1)])
@pytest.mark.parametrize("page", [1, 16])
def test_head_groups_and_pages(ops: OpTable, heads: int, groups: int, page: int) -> None:
    assert_attends(ops, make_batch([7, 16], [2, 1], heads=heads, groups=groups, page=page, index=torch.int64))


def test_mla_values_are_the_first_columns(ops: OpTable) -> None:
    q, k, _, *rest = make_batch([6, 5], [6, 1], groups=1)
    assert_attends(ops, (q, k, None, *rest), v_dim=5)


def test_window_without_causality_hides_only_the_past(ops: OpTable) -> None:
    assert_attends(ops, make_batch([6], [6]), window=2, causal=False)


def test_padded_request_with_a_query_row_gives_zero_and_minus_infinity(ops: OpTable) -> None:
    q, k, v, table, _, _ = make_batch([4, 0], [1, 1])
    out, lse = ops.attend_paged(q, k, v, table, torch.tensor([0, 1, 2]), torch.tensor([4, 0]), scale=1.0)
    assert out[1:].eq(0).all()
    assert lse[1:].eq(-math.inf).all()
    assert lse[0].isfinite().all()


def test_no_request_and_no_token(ops: OpTable) -> None:
    _, k, v, *_ = make_batch([4], [1])
    empty = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    out, lse = ops.attend_paged(torch.randn(0, 4, 8), k, v, *empty, scale=1.0)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (0, 4)


def test_nan_in_a_later_token_does_not_reach_earlier_queries(ops: OpTable) -> None:
    q, k, v, table, starts, lens = make_batch([6], [6])
    clean, _ = ops.attend_paged(q, k, v, table, starts, lens, scale=1.0)
    v[int(table[0, 1]), 0] = NAN  # position 4
    out, _ = ops.attend_paged(q, k, v, table, starts, lens, scale=1.0)
    torch.testing.assert_close(out[:4], clean[:4])
    assert out[4:6].isnan().all()


def test_tiles_of_queries_give_the_same(ops: OpTable, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([23], [20])
    whole = ops.attend_paged(*batch, scale=1.0, window=7)
    monkeypatch.setattr("baige_device.ops.attend_paged.reference._TILE_LOGITS", 4 * 23 * 6)
    for tiled, one in zip(ops.attend_paged(*batch, scale=1.0, window=7), whole, strict=True):
        torch.testing.assert_close(tiled, one)


def test_more_queries_than_tokens_is_refused(ops: OpTable) -> None:
    q, k, v, table, starts, _ = make_batch([4], [4])
    with pytest.raises(ContractError, match=r"attend_paged: seq_lens\[0\]: expected >= its 4 queries, got 3"):
        ops.attend_paged(q, k, v, table, starts, torch.tensor([3]), scale=1.0)
