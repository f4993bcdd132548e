"""merge_attention: two halves of a softmax are the whole; parts without weight may hold anything."""

from __future__ import annotations

import math

import pytest
import torch

from baige_device.registry.table import OpTable
from tests.unit.ops.attention_oracle import TOLERANCE


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("in_place", [False, True])
def test_two_parts_are_the_whole(ops: OpTable, dtype: torch.dtype, in_place: bool) -> None:
    logits, values = 20 * torch.randn(5, 3, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    parts = []
    for keys in (slice(0, 4), slice(4, 9)):
        out = logits[..., keys].softmax(-1) @ values[keys]
        parts += [out.to(dtype), logits[..., keys].logsumexp(-1).float()]
    buffers = {"out": parts[0], "lse": parts[1]} if in_place else {}
    out, lse = ops.merge_attention(*parts, **buffers)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), logits.softmax(-1) @ values, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_parts_without_weight(ops: OpTable) -> None:
    nan, real = torch.full((1, 2, 3), math.nan), torch.randn(1, 2, 3)
    none, some = torch.full((1, 2), -math.inf), torch.tensor([[0.5, -200.0]])
    for parts in ((nan, none, real, some), (real, some, nan, none)):
        out, lse = ops.merge_attention(*parts)
        torch.testing.assert_close(out, real)
        torch.testing.assert_close(lse, some)
    out, lse = ops.merge_attention(nan, none, nan, none)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, none)
