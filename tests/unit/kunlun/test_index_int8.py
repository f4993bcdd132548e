"""`index_topk` on int8 keys against a float64 oracle: prefixes, strides, chunks and both top-k kernels."""

from __future__ import annotations

from dataclasses import replace

import kunlun_emulator
import pytest
import torch
from torch import Tensor

from baige_device.backends.kunlun import index, limits

_LENS = [130, 64, 0, 7]


def build(queries: int, *, fused: bool = False, page: int = 64, seed: int = 3) -> dict[str, Tensor]:
    """A batch with `queries` query tokens a request (fewer for short ones); `fused` keeps keys in a wider cache."""
    random = torch.Generator().manual_seed(seed)
    counts = [min(queries, length) for length in _LENS]
    tokens = sum(counts)
    blocks = -(-max(_LENS) // page)
    pool = torch.randint(-127, 128, (4 * blocks + 2, page, 132), generator=random).to(torch.int8)
    return {
        "q": torch.randint(-127, 128, (tokens, 4, 128), generator=random).to(torch.int8),
        "weights": torch.randn(tokens, 4, generator=random),
        "k_cache": pool[..., :128] if fused else pool[..., :128].contiguous(),
        "block_table": torch.randperm(4 * blocks, generator=random).view(4, blocks).to(torch.int32),
        "q_starts": torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        "seq_lens": torch.tensor(_LENS, dtype=torch.int32),
        "k_scales": torch.rand(pool.shape[:2], generator=random) + 0.5,
    }


def check(found: Tensor, batch: dict[str, Tensor], topk: int) -> None:
    """Each row holds the positions of its largest scores, each once; ties at the edge may go either way."""
    starts = batch["q_starts"].tolist()
    page = batch["k_cache"].shape[1]
    for row, length in enumerate(_LENS):
        positions = torch.arange(length)
        pages = batch["block_table"][row, positions // page].long()
        scales = batch["k_scales"][pages, positions % page].double()
        keys = batch["k_cache"][pages, positions % page].double() * scales.unsqueeze(1)
        for token in range(starts[row], starts[row + 1]):
            own = length - starts[row + 1] + token
            relu = torch.relu(batch["q"][token].double() @ keys[: own + 1].T)
            scores = (batch["weights"][token].double().unsqueeze(1) * relu).sum(0)
            live = found[token][found[token] >= 0].long()
            count = min(topk, own + 1)
            assert live.unique().numel() == live.numel() == count
            edge = scores.sort(descending=True).values[count - 1]
            assert (scores[live] >= edge - 1e-3 * scores.abs().max()).all()


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("topk", [3, 64, 2048])
def test_positions(chip: kunlun_emulator.STATE.__class__, queries: int, fused: bool, topk: int) -> None:
    batch = build(queries, fused=fused)
    with kunlun_emulator.chip_rules():
        found = index.index_topk(**batch, topk=topk)
    check(found, batch, topk)
    kernel = "I8_paged_mqa_logits" if queries <= 2 else "I8_mqa_logits"
    assert chip.calls[kernel] == 1


def test_other_pages_are_gathered(chip: kunlun_emulator.STATE.__class__) -> None:
    batch = build(1, page=16)
    check(index.index_topk(**batch, topk=8), batch, 8)
    assert "I8_paged_mqa_logits" not in chip.calls


def test_logits_are_held_in_chunks(chip: kunlun_emulator.STATE.__class__, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_LOGITS_BYTES", replace(limits.INDEX_LOGITS_BYTES, value=4 * 130 * 3))
    for queries in (1, 5):
        batch = build(queries)
        check(index.index_topk(**batch, topk=8), batch, 8)
    assert chip.calls["I8_mqa_logits"] > 3


@pytest.mark.parametrize("chip", ["no_topk"], indirect=True)
def test_only_the_fixed_topk_kernel(chip: kunlun_emulator.STATE.__class__) -> None:
    batch = build(1)
    check(index.index_topk(**batch, topk=2048), batch, 2048)
    assert chip.calls["fast_topkv2"] == 1
    with pytest.raises(ValueError, match="topk: expected 2048"):
        index.index_topk(**batch, topk=64)
