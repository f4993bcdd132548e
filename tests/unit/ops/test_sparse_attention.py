"""sparse_attention against a float64 oracle: index lists per kv head, -1, second set, the fp8 latent format."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from baige_device.errors import ContractError
from baige_device.registry.table import OpTable
from tests.unit.ops.attention_oracle import TOLERANCE, attend_batch


def expected(q, sets, scale, v_dim):
    """sets: (keys by row and head, values by row and head, lists `[T, G, K]`)."""
    tokens, heads, _ = q.shape
    visible = []
    for t in range(tokens):
        for h in range(heads):
            pairs = []
            for keys, values, lists in sets:
                g = h // (heads // lists.shape[1])
                pairs += [(keys[row, g], values[row, g]) for row in lists[t, g].tolist() if row >= 0]
            visible.append(pairs)
    return attend_batch(q, visible, scale, v_dim)


def lists_of(tokens: int, groups: int, rows: int, k: int) -> torch.Tensor:
    lists = torch.stack([torch.randperm(rows)[:k] for _ in range(tokens * groups)]).view(tokens, groups, k)
    return lists.masked_fill(torch.rand(lists.shape) < 0.3, -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("paged", [False, True])
def test_gqa_with_second_set(ops: OpTable, dtype: torch.dtype, paged: bool) -> None:
    q = torch.randn(5, 6, 8).to(dtype)
    pool = torch.randn(24, 2, 2, 8).to(dtype)  # key and value of a row side by side: outer strides are odd
    extra = torch.randn(9, 2, 8).to(dtype)
    lists, extra_lists = lists_of(5, 2, 24, 7), lists_of(5, 2, 9, 4).int()
    lists[3] = extra_lists[3] = -1  # nothing at all
    lists[4] = -1  # the second set only
    k, v = pool[:, 0], pool[:, 1]
    wanted = expected(q, [(k, v, lists), (extra, extra, extra_lists)], 0.3, 8)
    if paged:
        k, v = (t.view(6, 4, 2, 8) if t.is_contiguous() else t.unflatten(0, (6, 4)) for t in (k, v))
    out, lse = torch.full((5, 6, 8), 123456.0).to(dtype), torch.full((5, 6), 123456.0)
    ops.sparse_attention(
        q, k, v, lists, scale=0.3, extra_k=extra, extra_v=extra, extra_indices=extra_lists, out=out, lse=lse
    )
    torch.testing.assert_close(out.double(), wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-4, atol=1e-4)


def test_nan_in_masked_row_zero_stays_out(ops: OpTable) -> None:
    pool = torch.randn(4, 1, 6)
    pool[0] = math.nan
    lists = torch.tensor([[[2, -1, 1, -1]], [[-1, -1, -1, -1]]])
    out, lse = ops.sparse_attention(torch.randn(2, 3, 6), pool, None, lists, scale=1.0, v_dim=4)
    assert out.isfinite().all()
    assert out[1].eq(0).all()
    assert lse[1].eq(-math.inf).all()


def test_minus_one_together_with_row_zero(ops: OpTable) -> None:
    q, pool = torch.randn(1, 1, 4), torch.randn(3, 1, 4)
    alone = ops.sparse_attention(q, pool, pool, torch.tensor([[[0, 2]]]), scale=1.0)
    padded = ops.sparse_attention(q, pool, pool, torch.tensor([[[0, -1, 2, -1]]]), scale=1.0)
    torch.testing.assert_close(padded, alone)


@pytest.mark.parametrize(("tokens", "rows", "k"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_empty(ops: OpTable, tokens: int, rows: int, k: int) -> None:
    pool = torch.randn(rows, 1, 4)
    lists = torch.full((tokens, 1, k), -1)
    out, lse = ops.sparse_attention(torch.randn(tokens, 2, 4), pool, pool, lists, scale=1.0)
    assert torch.equal(out, torch.zeros(tokens, 2, 4))
    assert torch.equal(lse, torch.full((tokens, 2), -math.inf))


def test_fp8_latent_rows(ops: OpTable) -> None:
    latent = torch.randn(4, 512).to(torch.float8_e4m3fn)
    scales, rope = torch.rand(4, 4), torch.randn(4, 64).to(torch.bfloat16)
    rows = [
        latent[i].view(torch.uint8).numpy().tobytes()
        + struct.pack("<4f", *scales[i].tolist())
        + rope[i].view(torch.uint8).numpy().tobytes()
        for i in range(4)
    ]
    pool = torch.tensor([list(row) for row in rows], dtype=torch.uint8).view(2, 2, 1, 656)
    columns = [latent[:, c].float() * scales[:, c // 128] for c in range(512)]
    keys = torch.cat([torch.stack(columns, 1), rope.float()], 1).unsqueeze(1)
    q, lists = torch.randn(3, 2, 576), torch.tensor([[[0, 3, -1]], [[1, 2, 0]], [[-1, -1, -1]]])
    wanted = expected(q, [(keys, keys[..., :512], lists)], 0.05, 512)
    out, lse = ops.sparse_attention(q, pool, None, lists, scale=0.05, v_dim=512, kv_format="fp8_ds_mla")
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-4, atol=1e-4)


def test_row_outside_the_pool_is_refused(ops: OpTable) -> None:
    pool = torch.randn(3, 1, 4)
    with pytest.raises(ContractError, match=r"indices\[0, 0, 1\]: expected -1 or an index in \[0, 3\), got 3"):
        ops.sparse_attention(torch.randn(1, 1, 4), pool, pool, torch.tensor([[[0, 3]]]), scale=1.0)


def test_second_set_of_another_shape_is_refused(ops: OpTable) -> None:
    q, k, v = torch.randn(2, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    lists = torch.zeros(2, 2, 1, dtype=torch.int64)

    def attend(extra_k: torch.Tensor, extra_v: torch.Tensor, extra_lists: torch.Tensor) -> None:
        ops.sparse_attention(q, k, v, lists, scale=1.0, extra_k=extra_k, extra_v=extra_v, extra_indices=extra_lists)

    with pytest.raises(ContractError, match=r"extra_k.shape\[-2\]: expected G = 2 \(as k_rows\), got 1"):
        attend(k[:, :1], v[:, :1], lists[:, :1])
    with pytest.raises(ContractError, match=r"extra_v.shape\[-1\]: expected Dv = 8 \(as v_rows\), got 4"):
        attend(k, v[..., :4].contiguous(), lists)
    with pytest.raises(ContractError, match=r"extra_k\.dtype: expected float32, got float16"):
        attend(k.half(), v.half(), lists)
