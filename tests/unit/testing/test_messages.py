"""What a vendor reads when a case fails: rows, slots and columns instead of bytes, and lists cut short."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from baige_device.testing.cases import all_cases
from baige_device.testing.checks import Mismatch, check_list, check_members, check_storage, check_untouched, twin
from baige_device.testing.explain import explain_byte
from baige_device.testing.runner import Runner, open_backend
from tests.unit.testing.mutants import MUTANTS, Mutation, Op, broken_source

GATHER, SCATTER, WRITE, RESOLVE = "uva_sparse_gather", "uva_sparse_scatter", "kv_write", "hot_cache_resolve"


def _reason(op: str, name: str, mutation: Mutation) -> str:
    backend, device = open_backend("broken", candidates=[broken_source(op, mutation)])
    case = next(case for case in all_cases([op]) if case.id == name)
    outcome = Runner(backend, device, seed=17).run(case)
    assert outcome.status == "failed", outcome
    assert outcome.reason.startswith("Mismatch: ")
    return outcome.reason


def _wrong_element(op: Op) -> Op:
    def broken(values: Any, cache: Any, slots: Any) -> None:
        values = values.clone()
        values[7, 1, 5] = 3.0
        op(values, cache, slots)

    return broken


def test_kv_write_names_slot_head_column_and_token() -> None:
    reason = _reason(WRITE, "int32-slots", _wrong_element)
    assert re.search(r"cache: \d wrong byte\(s\), the first at cache\[\d, \d+, 1, 5\]: expected \S+ \(0x", reason)
    assert re.search(r"got 3 \(0x4040\); slot \d+, head 1, column 5: where token 7 goes", reason)


# Several rows for -1 land in one place, and threads may mix them: then none of them is recognised.
MINUS_ONE = [
    (WRITE, "minus-half", "minus_one_writes_the_last_slot", r"it (holds token \d+, whose slot is -1|is the last slot)"),
    (WRITE, "minus-all", "minus_one_writes_the_last_slot", r"it (holds token \d+, whose slot is -1|is the last slot)"),
    (GATHER, "minus-skip-all-flat", "minus_one_destination_is_the_last_row", r"it (holds entry \d+,|is the last row)"),
    (SCATTER, "minus-skip-all-by-request", "minus_one_destination_is_the_last_row", r"nothing names it, and it "),
    (SCATTER, "minus-all-flat", "minus_one_zeroes_the_backup", r"entry \d+ names it, and its source is -1"),
]


@pytest.mark.parametrize(("op", "name", "bug", "told"), MINUS_ONE, ids=[f"{op}-{name}" for op, name, *_ in MINUS_ONE])
def test_a_row_for_minus_one_is_told(op: str, name: str, bug: str, told: str) -> None:
    reason = _reason(op, name, MUTANTS[op, bug])
    assert re.search(told, reason), reason
    assert reason.endswith(": a row for -1 was written")


def test_gather_says_which_row_must_become_zeros() -> None:
    reason = _reason(GATHER, "minus-all-flat", MUTANTS[GATHER, "minus_one_leaves_the_row_stale"])
    assert re.search(r"row \d+, column \d+: where entry \d+ goes, whose source is -1: it must become zeros", reason)


def test_gather_says_which_row_is_behind_the_count() -> None:
    reason = _reason(GATHER, "count-zero-requests-3", MUTANTS[GATHER, "ignores_the_count"])
    assert re.search(r"row \d+, column \d+: entry \d+ of request 0 names it, and it is behind the count of 0", reason)


def test_the_row_for_minus_one_is_recognised() -> None:
    cache, values = torch.zeros(2, 4, 1, 8), torch.arange(24.0).view(3, 1, 8) + 1
    args = {"values": values, "cache": cache, "slots": torch.tensor([2, -1, 7])}
    before = {**args, "cache": twin(cache)}
    cache[1, 1] = values[1]
    told = explain_byte(WRITE, "cache", args, before, 5 * 32 + 4)
    assert told == (
        "slot 5, head 0, column 1: nothing names it, and it holds token 1, whose slot is -1: a row for -1 was written"
    )
    assert explain_byte(WRITE, "cache", args, before, 2 * 32) == "slot 2, head 0, column 0: where token 0 goes"
    assert explain_byte(WRITE, "values", args, before, 0) == ""
    assert explain_byte("attend_paged", "cache", args, before, 0) == ""


@pytest.mark.parametrize("row", [3, 4], ids=["last-row-of-page-minus-one", "row-before-page-zero"])
def test_a_row_before_the_cache_is_told(row: int) -> None:
    base = torch.zeros(6, 5, 1, 8)
    cache = base[2:4, :4]
    args = {"values": torch.ones(1, 1, 8), "cache": cache, "slots": torch.tensor([-1])}
    before = {**args, "cache": twin(cache)}
    base[1, row] = torch.finfo(torch.float32).max
    told = rf"memory around it was written: 32 byte.*{32 * (5 - row)} bytes before the first element"
    with pytest.raises(Mismatch, match=told) as caught:
        check_untouched(args, before, ("cache",))
    told = explain_byte(WRITE, caught.value.argument, args, before, caught.value.byte)
    assert told == "where slot -1 would be: a row for -1 was written"


def test_a_wrong_byte_in_a_gap_is_located() -> None:
    base = torch.zeros(4, 5)
    want = twin(base[:, :3])
    base[1, 4] = 7
    with pytest.raises(Mismatch, match="the first at 38 bytes from the start, in a gap of pool: expected byte 0x00"):
        check_storage("pool", base[:, :3], want)


def test_long_lists_are_cut_short() -> None:
    want = list(range(2048))
    got = [*want[:100], *(-1 for _ in range(1948))]
    with pytest.raises(Mismatch, match=r"x\[100\]: expected 100, got -1 \(1948 of 2048 differ; from there") as caught:
        check_list("x", got, want)
    assert "expected [100, 101, 102, 103, 104, 105, ... 1942 more]" in str(caught.value)
    assert len(str(caught.value)) < 250
    with pytest.raises(Mismatch, match=r"x: missing \[100, .* 1942 more\], not expected \[-1, -1, .* more\]"):
        check_members("x", got, want)
    with pytest.raises(Mismatch, match="x: expected 2048 entries, got 2047"):
        check_list("x", want[1:], want)


@pytest.mark.parametrize("bug", ["hits_do_not_become_recent", "evicts_a_hit", "padded_rows_are_counted"])
def test_a_resolve_of_2048_keys_fails_in_few_words(bug: str) -> None:
    assert len(_reason(RESOLVE, "topk-2048-hot-4096", MUTANTS[RESOLVE, bug])) < 400


def test_a_str_is_no_dtype() -> None:
    from baige_device.ops.dequantize_blocks.contract import CONTRACT

    payload, scales = torch.zeros(4, 4, dtype=torch.int8), torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"expected torch.bfloat16, torch.float16 or torch.float32, got the str 'bfl"):
        CONTRACT.check(False, payload, scales, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"got torch.int32"):
        CONTRACT.check(False, payload, scales, dtype=torch.int32)
