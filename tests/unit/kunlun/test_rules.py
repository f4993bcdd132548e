"""Syncs and capture: what an offer says about the host is what the emulated chip counts."""

from __future__ import annotations

import kunlun_emulator
import pytest
import torch

from baige_device.backends.kunlun import (
    attend,
    gather_memcpy,
    gather_staged,
    gather_transfer,
    kv_write,
    mla_dense,
    normalise,
)
from baige_device.backends.kunlun.host_alloc import host_alloc
from baige_device.registry.offers import Need
from baige_device.testing import all_cases, open_backend
from baige_device.testing.runner import Runner
from tests.unit.kunlun.strict import strict_kit

Chip = kunlun_emulator.STATE.__class__


def _batch(groups: int = 1) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(3, 4, 64).to(torch.bfloat16),
        "k_cache": torch.randn(4, 64, groups, 64).to(torch.bfloat16),
        "v_cache": torch.randn(4, 64, groups, 64).to(torch.bfloat16),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "q_starts": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([70, 100], dtype=torch.int32),
    }


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_reads_lengths_once_and_with_host_twins_never(chip: Chip, groups: int) -> None:
    batch = _batch(groups)
    chip.reset()
    with kunlun_emulator.chip_rules():
        plain, _ = attend.attend_paged(**batch, scale=0.1)
    assert chip.syncs == 2, "the two length tensors"
    with kunlun_emulator.chip_rules():
        twins = [(batch[name], batch[name].cpu()) for name in ("q_starts", "seq_lens")]
        chip.reset()
        with normalise.host_twins(twins):
            again, _ = attend.attend_paged(**batch, scale=0.1)
    assert chip.syncs == 0
    assert torch.equal(plain, again)


def test_dense_mla_splits_long_sequences(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _batch()
    cache = torch.randn(4, 64, 1, 576).to(torch.bfloat16)
    args = {**batch, "q": torch.randn(3, 4, 576).to(torch.bfloat16), "k_cache": cache, "v_cache": None}
    whole, whole_lse = attend.attend_paged(**args, scale=0.05, v_dim=512)
    chip.reset()
    monkeypatch.setattr(mla_dense, "SPARSE_TOPK", type(mla_dense.SPARSE_TOPK)(32, "", "", ""))
    parts, parts_lse = attend.attend_paged(**args, scale=0.05, v_dim=512)
    assert chip.calls["fwd_kvcache_mla"] == 4
    assert (parts.double() - whole.double()).abs().max() < 0.02
    assert (parts_lse - whole_lse).abs().max() < 1e-3


@pytest.mark.parametrize(("module", "most"), [(gather_memcpy, 0), (gather_transfer, 1), (gather_staged, 1)])
def test_gather_syncs(chip: Chip, module: object, most: int) -> None:
    with host_alloc(64 * 132) as buffer:
        host = buffer.tensor.view(64, 132)
        pool = torch.zeros(8, 132, dtype=torch.uint8)
        rows, slots = torch.tensor([3, -1, 9]), torch.tensor([0, 1, 7])
        count = torch.tensor([2], dtype=torch.int32)
        chip.reset()
        with kunlun_emulator.chip_rules():
            module.uva_sparse_gather(host, pool, rows, slots, count)  # type: ignore[attr-defined]
        assert chip.syncs <= most


@pytest.mark.parametrize(
    "op",
    [
        "hot_cache_resolve",
        "dequantize_blocks",
        "sparse_attention",
        "merge_attention",
        "kv_write",
        "moe_dispatch",
        "moe_expert_ffn",
        "moe_combine",
    ],
)
def test_what_claims_to_be_capturable_is(chip: Chip, op: str) -> None:
    backend, device = open_backend("kunlun")
    runner = Runner(backend, device, seed=3)
    ran = 0
    for case in all_cases([op]):
        params = {**case.params, "graph": True}
        chosen = next(
            (o for o in backend.offers(op, device) if o.available and o.supports(Need(op, "t", params))), None
        )
        if chosen is None or case.tags or case.uses or "walk" in case.id:
            continue
        with strict_kit(capture=True):
            outcome = runner.run(type(case)(op, case.id, case.run, params))
        assert outcome.status == "passed", f"{case.name}: {outcome.reason}"
        ran += 1
    assert ran or op == "moe_combine", "moe_combine needs a dispatch, which its own cases run"


def test_capture_catches_what_a_chip_would_not(chip: Chip) -> None:
    x = torch.arange(4)
    for bad in (lambda: x[0].item(), lambda: x.nonzero(), lambda: x[x > 1], lambda: x.cpu(), lambda: x.tolist()):
        with kunlun_emulator.chip_rules(capture=True), pytest.raises(kunlun_emulator.CaptureViolation):
            bad()


def test_float8_is_storage_at_best(chip: Chip) -> None:
    with kunlun_emulator.chip_rules():
        with pytest.raises(kunlun_emulator.ChipError):
            torch.zeros(4).to(torch.float8_e4m3fn)
        fresh = torch.empty(3)
    assert fresh.isnan().all()


def test_collectives_refuse_what_bkcl_does_not_have(chip: Chip) -> None:
    import torch_xmlir

    assert torch_xmlir.__emulator__
    with pytest.raises(kunlun_emulator.ChipError, match="no such type"):
        torch.distributed.all_gather_into_tensor(torch.zeros(4, dtype=torch.float8_e4m3fn), torch.zeros(4))
    with pytest.raises(kunlun_emulator.ChipError, match="another type"):
        torch.distributed.all_reduce(torch.zeros(4, dtype=torch.int8))


def test_leaving_the_emulator_leaves_torch_as_it_was() -> None:
    before = torch.Tensor.cpu, torch.cuda.cudart, torch.distributed.all_reduce, "cpu" in vars(torch.Tensor)
    with kunlun_emulator.installed():
        import kunlun_ops  # noqa: F401
        import torch_xmlir  # noqa: F401
        import xspeedgate_ops  # noqa: F401
    assert before == (torch.Tensor.cpu, torch.cuda.cudart, torch.distributed.all_reduce, "cpu" in vars(torch.Tensor))
    assert not hasattr(torch.ops.xspeedgate_ops, "batch_memcpy")


def test_rows_that_name_nothing_leave_a_wider_cache_bit_for_bit() -> None:
    cache = torch.full((2, 4, 1, 8), 1.2345678)
    before = cache.clone()
    kv_write.kv_write_portable(torch.zeros(3, 1, 8, dtype=torch.bfloat16), cache, torch.full((3,), -1))
    assert torch.equal(cache, before)
