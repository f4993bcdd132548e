"""The product with int8 weights as they were gathered, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kunlun_emulator
import pytest
import torch

from baige_device.backends.kunlun import int8_linear as subject
from baige_device.backends.kunlun import normalise, quantise
from baige_device.backends.kunlun.all_gather import fp8_all_gather
from baige_device.errors import ContractError
from baige_device.ops.fp8_all_gather.image import WeightSpec, pack_shard, piece_views, plan_image

Chip = kunlun_emulator.STATE.__class__


def _noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _gathered(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight's payload and scales as views of a gathered image."""
    layout = plan_image([WeightSpec("w", *weight.shape, wire="int8_absmax", block=(1, 0))], 1)
    shard = pack_shard(layout, 0, {"w": weight}, quantise.quantize_blocks)
    image = fp8_all_gather(shard, layout.shard_bytes).wait()
    _, payload, scales = next(iter(piece_views(layout, image, "w")))
    return payload, scales


def _excess(x: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor) -> float:
    """How far the result is outside the stated bound, as a share of it; at most 1 is right."""
    with kunlun_emulator.chip_rules():
        got = subject.int8_linear(x, payload, scales)
    assert got.dtype == x.dtype
    real = payload.double() * scales.double()
    want = x.double() @ real.T
    step = 0.5 * x.double().abs().amax(1, keepdim=True) / 127
    bound = 1.001 * step * real.abs().sum(1) + torch.finfo(x.dtype).eps * want.abs() + 1e-12
    return float(((got.double() - want).abs() / bound).nan_to_num(torch.inf).max()) if got.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "depth", "rows"), [(1, 1, 1), (7, 96, 33), (129, 1536, 40), (3, 7168, 5), (0, 8, 4)]
)
def test_within_the_stated_bound(chip: Chip, dtype: torch.dtype, tokens: int, depth: int, rows: int) -> None:
    payload, scales = _gathered(_noise(rows, depth, seed=rows) * 0.02)
    assert _excess(_noise(tokens, depth, seed=depth).to(dtype), payload, scales) <= 1.0


def test_strided_activations_zero_rows_and_zero_weights(chip: Chip) -> None:
    weight = _noise(12, 64, seed=1)
    weight[3] = 0
    payload, scales = _gathered(weight)
    x = _noise(64, 10, seed=2).to(torch.bfloat16).t()
    x[4] = 0
    assert _excess(x, payload, scales) <= 1.0
    got = subject.int8_linear(x, payload, scales)
    assert not got[4].any()
    assert not got[:, 3].any()


def test_a_weight_in_pieces_is_one_product_a_piece(chip: Chip) -> None:
    payload, scales = _gathered(_noise(20, 64, seed=5))
    x = _noise(6, 64, seed=6).to(torch.bfloat16)
    rows = subject.quantise_rows(x)
    parts = [subject.int8_product(rows, payload[part], scales[part]) for part in (slice(0, 7), slice(7, 20))]
    assert torch.equal(torch.cat(parts, 1), subject.int8_linear(x, payload, scales))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(2, 64)}, "x"),
        ({"payload": torch.zeros(4, 64)}, "payload"),
        ({"payload": torch.zeros(4, 63, dtype=torch.int8)}, "payload"),
        ({"scales": torch.zeros(4, 2)}, "scales"),
        ({"scales": torch.zeros(4, 1, dtype=torch.float64)}, "scales"),
    ],
)
def test_refusals(change: dict[str, Any], argument: str) -> None:
    good = {
        "x": torch.zeros(2, 64, dtype=torch.bfloat16),
        "payload": torch.zeros(4, 64, dtype=torch.int8),
        "scales": torch.zeros(4, 1),
    }
    with kunlun_emulator.installed("torch2.9"), pytest.raises(ContractError) as raised:
        subject.int8_linear(**{**good, **change})
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("name", "broken", "text"),
    [
        ("dense", lambda t: t.t().contiguous().t(), "is not contiguous"),
        ("absmax_of_scale", lambda s: s, "wrong"),
        ("absmax_of_scale", lambda s: s[:1] * 127, "one absmax a row"),
        ("absmax_of_scale", lambda s: s.double() * 127, "w_pc_max: torch.float64"),
    ],
)
def test_the_emulator_catches(chip: Chip, name: str, broken: Callable[..., Any], text: str) -> None:
    payload, scales = _gathered(_noise(12, 64, seed=8))
    x = _noise(5, 64, seed=9).to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalise, name, broken)
        if text == "wrong":
            assert _excess(x, payload, scales) > 10
        else:
            with pytest.raises(kunlun_emulator.ChipError, match=text):
                subject.int8_linear(x, payload, scales)
