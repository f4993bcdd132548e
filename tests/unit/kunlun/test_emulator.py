"""The emulator itself: kernels that the backend does not call yet, and how documented semantics compose."""

from __future__ import annotations

import kunlun_emulator
import pytest
import torch

Chip = kunlun_emulator.STATE.__class__


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_int8_product_takes_absmax_and_a_scale_is_off_by_127_an_operand(chip: Chip) -> None:
    import kunlun_ops

    x, w = _noise(5, 64, seed=1), _noise(32, 64, seed=2)
    operands = []
    for matrix in (x, w):
        q, absmax = torch.zeros(matrix.shape, dtype=torch.int8), torch.zeros(matrix.shape[0], 1)
        kunlun_ops.quant2d(matrix, q, absmax, force_sdnn=True)
        operands.append((q, absmax))
    (xq, xm), (wq, wm) = operands
    want = x.double() @ w.double().T
    right, wrong = torch.zeros(5, 32), torch.zeros(5, 32)
    kunlun_ops.matmul(xq, wq, right, x_pc_max=xm, w_pc_max=wm)
    kunlun_ops.matmul(xq, wq, wrong, x_pc_max=xm / 127, w_pc_max=wm / 127)
    assert (right.double() - want).abs().max() / want.abs().max() < 0.03
    assert torch.allclose(wrong * 127 * 127, right, rtol=1e-4)


def test_zero_rows_have_absmax_zero_and_no_nan(chip: Chip) -> None:
    import kunlun_ops

    q, absmax = torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1)
    kunlun_ops.quant2d(torch.zeros(2, 4), q, absmax)
    assert not q.any()
    assert not absmax.any()


@pytest.mark.parametrize("batch", [1023, 1024])
def test_speculative_attention_ends_below_1024_requests(chip: Chip, batch: int) -> None:
    import kunlun_ops

    q = _noise(batch, 1, 32).to(torch.bfloat16)
    cache = _noise(1, 1, 64, 32).to(torch.bfloat16)
    host, table = torch.ones(batch, dtype=torch.int32), torch.zeros(batch, 1, dtype=torch.int32)
    out = torch.zeros_like(q)
    args = (out, q, cache, cache, host, host.clone(), batch, 1, 64, 1, 32, 0.1, 1, 64, 1)
    if batch == 1024:
        with pytest.raises(kunlun_emulator.ChipError, match="batch 1024"):
            kunlun_ops.speculative_attention(*args, block_tables=table)
    else:
        kunlun_ops.speculative_attention(*args, block_tables=table)
        assert torch.equal(out, cache[0, :, :1].expand(batch, -1, -1))


def test_rows_without_a_key_stay_as_they_were(chip: Chip) -> None:
    import kunlun_ops

    out = torch.full((1, 1, 8, 512), 7.0, dtype=torch.bfloat16)
    peaks, sums = torch.full((1, 1, 8), 5.0), torch.full((1, 1, 8), 5.0)
    lists = torch.full((1, 1, 64), -1, dtype=torch.int32)
    host = torch.tensor([64], dtype=torch.int32)
    q, kv = torch.ones(1, 1, 8, 576, dtype=torch.bfloat16), torch.ones(64, 576, dtype=torch.bfloat16)
    kunlun_ops.fwd_kvcache_mla(q, kv, lists, host, out, peaks, sums, 0.1, 64, kv_lod_xpu=host.clone())
    assert bool((out == 7).all())
    assert bool((peaks == 5).all() and (sums == 5).all())


def test_gathered_scales_lie_behind_the_keys_of_a_page(chip: Chip) -> None:
    import xspeedgate_ops  # noqa: F401 - registers the ops

    pages = torch.zeros(3, 64 * 132, dtype=torch.uint8)
    scales = _noise(3, 64, seed=3)
    pages[:, 64 * 128 :] = scales.view(torch.uint8)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    lengths = torch.tensor([100], dtype=torch.int32)
    got = torch.ops.xspeedgate_ops.gather_paged_scale(pages, table, 64, 128, 128, 64 * 128, lengths)
    assert torch.equal(got, torch.cat([scales[2], scales[0]]).unsqueeze(0))


@pytest.mark.parametrize("name", list(kunlun_emulator.PROFILES))
def test_profiles_have_what_they_say(name: str) -> None:
    import importlib

    profile = kunlun_emulator.PROFILES[name]
    with kunlun_emulator.installed(name):
        for module in ("torch_xmlir", "kunlun_ops", "xtorch_ops", "xspeedgate_ops"):
            if module in profile.modules:
                assert importlib.import_module(module).__emulator__ is True
            else:
                with pytest.raises(ModuleNotFoundError, match="Kunlun emulator"):
                    importlib.import_module(module)
        for absent in profile.absent:
            namespace = torch.ops.xspeedgate_ops if absent.startswith("xspeed") else None
            assert not hasattr(namespace, absent.partition(".")[2])
