"""FlashMLA's split plan made anew: every block of every list is dealt once, and foreign plans are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baige_device.backends.cuda.flash_mla_plan import leave_parts_free, split_plan

TOTAL = 66


def dealt(plan: Tensor, splits: Tensor, tokens: int, blocks: int) -> Tensor:
    """How often each block is read, `[T, blocks]`; checks each row's split numbers and marks on the way."""
    times, seen = torch.zeros(tokens, blocks, dtype=torch.int64), [0] * tokens
    counts = splits.diff().tolist()
    for first, last, first_block, end, first_split, cut_first, cut_last in plan.tolist():
        if first >= tokens:
            continue
        assert first_split == seen[first]
        assert cut_first == (counts[first] > 1)
        assert cut_last == (counts[last] > 1)
        for token in range(first, last + 1):
            times[token, first_block if token == first else 0 : end if token == last else blocks] += 1
            seen[token] += 1
    assert seen == counts
    return times


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 64, 65, 127, 128, 256])
@pytest.mark.parametrize("blocks", [1, 4, 8, 32])
@pytest.mark.parametrize("free", [0, 1, 4, 8, 33])
def test_every_block_is_dealt_once_among_the_first_parts(tokens: int, blocks: int, free: int) -> None:
    made = split_plan(tokens, blocks, TOTAL - free, TOTAL)
    assert made is not None
    assert bool(dealt(*made, tokens, blocks).eq(1).all())
    assert bool((made[0][TOTAL - free :, 0] >= tokens).all())


def test_room_is_made_in_a_known_plan_only() -> None:
    plan, splits = split_plan(128, 32, TOTAL, TOTAL) or pytest.fail("no plan")
    padded = torch.cat([plan, torch.full((TOTAL, 1), 7, dtype=torch.int32)], 1)  # FlashMLA's rows have eight numbers
    made = leave_parts_free(padded, splits, 128, 32, 4)
    assert made is not None
    assert made[0].shape == padded.shape
    assert int((made[0][:, 0] < 128).sum()) == TOTAL - 4
    assert bool(dealt(made[0][:, :7], made[1], 128, 32).eq(1).all())
    most = leave_parts_free(padded, splits, 128, 32, 1000)
    assert most is not None
    assert 0 < int((most[0][:, 0] < 128).sum()) <= TOTAL // 2
    wrong, shifted = padded.clone(), splits.clone()
    wrong[3, 2] += 1
    shifted[5] += 1
    for foreign in ((wrong, splits), (padded, shifted), (padded.long(), splits), (padded[:, :6], splits)):
        assert leave_parts_free(*foreign, 128, 32, 4) is None
    assert leave_parts_free(padded, splits, 127, 32, 4) is None
    assert leave_parts_free(padded, splits, 128, 31, 4) is None
