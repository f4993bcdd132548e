"""The comparisons and oracles that everything rests on, against torch and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from baige_device.testing.checks import Mismatch, check_close, check_equal, check_storage, check_untouched, twin, twins
from baige_device.testing.oracle_attention import attend, decode_fp8_ds_mla
from baige_device.testing.oracle_fp8 import e4m3_values, nearest_e4m3


def test_e4m3_values_equal_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(e4m3_values(), codes.double(), rtol=0, atol=0, equal_nan=True)


def test_nearest_e4m3_equals_torch_below_the_maximum() -> None:
    values = torch.cat([torch.randn(4000) * 10, torch.linspace(-448, 448, 5001), torch.tensor([0.0, 2.0**-10])])
    torch.testing.assert_close(
        nearest_e4m3(values.double()).float(), values.to(torch.float8_e4m3fn).float(), rtol=0, atol=0
    )
    assert nearest_e4m3(torch.tensor([1e9, -1e9], dtype=torch.float64)).tolist() == [448.0, -448.0]


def test_attend_equals_torch() -> None:
    q, k, v = (torch.randn(5, 8, dtype=torch.float64) for _ in range(3))
    visible = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    out, lse = attend(q, k, v, visible, 0.3)
    want = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=0.3)[0]
    torch.testing.assert_close(out, want)
    assert math.isclose(float(lse[0]), float(q[0] @ k[0] * 0.3))


def test_attend_without_a_visible_key() -> None:
    out, lse = attend(
        torch.ones(1, 2).double(),
        torch.full((3, 2), math.nan).double(),
        torch.full((3, 2), math.nan).double(),
        torch.zeros(1, 3, dtype=torch.bool),
        1.0,
    )
    assert out.tolist() == [[0.0, 0.0]]
    assert lse.tolist() == [-math.inf]


def test_fp8_rows_decode() -> None:
    latent = torch.randn(2, 512).to(torch.float8_e4m3fn)
    scales, rope = torch.rand(2, 4), torch.randn(2, 64, dtype=torch.bfloat16)
    rows = torch.cat([latent.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], -1)
    want = torch.cat([(latent.double().view(2, 4, 128) * scales.double()[..., None]).flatten(1), rope.double()], 1)
    torch.testing.assert_close(decode_fp8_ds_mla(rows), want)


def test_twin_keeps_strides_and_storage() -> None:
    base = torch.arange(40)
    view = base[3:33].view(5, 6)[:, 1:4]
    copy = twin(view)
    assert copy.stride() == view.stride()
    assert copy.storage_offset() == view.storage_offset()
    view[0, 0] = -1
    assert int(copy[0, 0]) == 4


def test_a_write_outside_the_view_is_seen() -> None:
    base = torch.zeros(10)
    args = {"out": base[2:5]}
    before = twins(args)
    args["out"].fill_(1)
    check_untouched(args, before, ("out",))
    with pytest.raises(Mismatch, match="out: it, or memory around it"):
        check_untouched(args, before, ())
    base[5] = 1
    with pytest.raises(Mismatch, match="out: memory around it was written"):
        check_untouched(args, before, ("out",))


def test_check_storage_sees_gaps() -> None:
    base = torch.zeros(4, 5)
    want = twin(base[:, :3])
    base[1, 4] = 7
    with pytest.raises(Mismatch, match="pool: 2 wrong byte"):
        check_storage("pool", base[:, :3], want)


def test_check_close_judges_nan_and_infinities() -> None:
    inf = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    assert check_close("x", inf.clone(), inf, 0.0) == 0.0
    assert check_close(
        "x", torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0], dtype=torch.float64), 0.2
    ) == pytest.approx(0.5 / 3)
    for got in ([math.nan, -math.inf], [math.inf, math.inf], [1.0, -math.inf]):
        with pytest.raises(Mismatch):
            check_close("x", torch.tensor(got), inf, 1e9)
    with pytest.raises(Mismatch, match="shape"):
        check_close("x", torch.zeros(3), inf, 1.0)


def test_check_equal_names_the_place() -> None:
    with pytest.raises(Mismatch, match=r"x\[1\]: expected 2, got 3 \(1 of 2 differ\)"):
        check_equal("x", torch.tensor([1, 3]), torch.tensor([1, 2]))
