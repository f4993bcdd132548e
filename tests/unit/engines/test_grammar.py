"""The grammar bitmask against bits read one by one in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baige_device.engines.grammar import apply_token_bitmask
from baige_device.errors import ContractError

WORD_BITS = 32


def random_words(rows: int, words: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, words), generator=torch.Generator().manual_seed(5)).int()


def allowed(bitmask: Tensor, row: int, token: int) -> bool:
    word = int(bitmask[row, token // WORD_BITS]) & 0xFFFFFFFF
    return word >> token % WORD_BITS & 1 == 1


def expected(logits: Tensor, bitmask: Tensor, rows: list[int]) -> Tensor:
    wanted = logits.clone()
    for row in rows:
        for token in range(min(logits.shape[1], WORD_BITS * bitmask.shape[1])):
            if not allowed(bitmask, row, token):
                wanted[row, token] = -math.inf
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 1000])
def test_bits_decide(dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary).to(dtype)
    bitmask = random_words(3, -(-vocabulary // WORD_BITS))
    bitmask[0], bitmask[1] = -1, 0  # everything, and nothing
    wanted = expected(logits, bitmask, [0, 1, 2])
    apply_token_bitmask(logits, bitmask)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("give", [list, torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.int32)])
@pytest.mark.parametrize("rows", [[2, 0], [3], [0, 1, 2, 3]])
def test_only_the_given_rows(give: Callable[[list[int]], Any], rows: list[int]) -> None:
    logits, bitmask = torch.randn(5, 70), random_words(4, 3)
    wanted = expected(logits, bitmask, rows)
    apply_token_bitmask(logits, bitmask, give(rows))
    assert torch.equal(logits, wanted)


def test_no_rows_change_nothing() -> None:
    logits, bitmask = torch.randn(2, 40), random_words(2, 2)
    before = logits.clone()
    apply_token_bitmask(logits, bitmask, [])
    assert torch.equal(logits, before)
    apply_token_bitmask(logits[:0], bitmask[:0])


@pytest.mark.parametrize("words", [1, 2, 5])
def test_narrow_and_wide_masks_and_strided_logits(words: int) -> None:
    whole = torch.randn(4, 140)
    logits, bitmask = whole[::2, :70], random_words(2, words)
    wanted, rest = expected(logits, bitmask, [0, 1]), whole[1::2].clone()
    apply_token_bitmask(logits, bitmask)
    assert torch.equal(whole[::2, :70], wanted)
    assert torch.equal(whole[1::2], rest)


def test_nan_of_an_allowed_token_stays() -> None:
    logits = torch.full((1, 32), math.nan)
    apply_token_bitmask(logits, torch.tensor([[1]], dtype=torch.int32))
    assert logits[0, 0].isnan()
    assert (logits[0, 1:] == -math.inf).all()


@pytest.mark.parametrize(
    ("logits", "bitmask", "words"),
    [
        (torch.zeros(2, 40), torch.zeros(3, 2, dtype=torch.int32), "bitmask.shape\\[0\\]: expected 2"),
        (torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64), "bitmask: expected an int32"),
        (torch.zeros(40), torch.zeros(1, 2, dtype=torch.int32), "logits: expected a float tensor"),
        (torch.zeros(2, 40).int(), torch.zeros(2, 2, dtype=torch.int32), "logits: expected a float tensor"),
    ],
)
def test_refusals(logits: Tensor, bitmask: Tensor, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        apply_token_bitmask(logits, bitmask)
