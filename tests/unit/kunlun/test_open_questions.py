"""Each open question has a probe; a surprising answer withholds an offer with a reason, before the first call."""

from __future__ import annotations

from dataclasses import replace

import kunlun_emulator
import pytest

from baige_device.backends.kunlun import open_questions
from baige_device.ops import OP_NAMES
from baige_device.registry.offers import DeviceInfo, Need
from baige_device.registry.resolve import Resolution, resolve
from baige_device.testing import open_backend
from tests.unit.kunlun.conftest import forget


def _resolved(**readings: object) -> dict[str, Resolution]:
    with kunlun_emulator.installed(replace(kunlun_emulator.PROFILES["torch2.9"], **readings)):  # type: ignore[arg-type]
        forget()
        backend, device = open_backend("kunlun")
        found = resolve(backend, device)
    forget()
    return found


def _chosen(resolution: Resolution) -> str:
    label = "" if resolution.chosen is None else resolution.chosen.offer.label
    return label.removeprefix("baige_device.backends.kunlun.")


@pytest.mark.parametrize(
    ("readings", "op", "chosen"),
    [
        ({}, "uva_sparse_gather", "gather_memcpy:uva_sparse_gather"),
        ({"memcpy_takes_host": False}, "uva_sparse_gather", "gather_transfer:uva_sparse_gather"),
        (
            {"memcpy_takes_host": False, "item_step_bytes": 64 * 1152},
            "uva_sparse_scatter",
            "gather_staged:uva_sparse_scatter",
        ),
        ({"kv_lod": "row_ids"}, "sparse_attention", "sparse:sparse_attention"),
        ({"kv_lod": "positions"}, "sparse_attention", "sparse:sparse_attention"),
        ({"flash_skips_negative": False}, "kv_write", "kv_write:kv_write_portable"),
        ({"window_counts_self": True}, "attend_paged", ""),
        ({"moe_stable": False}, "moe_dispatch", ""),
        ({"register_status": 801}, "host_alloc", ""),
    ],
)
def test_the_answer_decides(readings: dict[str, object], op: str, chosen: str) -> None:
    resolution = _resolved(**readings)[op]
    assert _chosen(resolution) == chosen
    if readings and not chosen:
        assert "self-test" in resolution.reason


def test_row_sizes_that_were_not_proven_are_refused() -> None:
    readings = {"memcpy_takes_host": False, "item_step_bytes": 16}
    with kunlun_emulator.installed(replace(kunlun_emulator.PROFILES["torch2.9"], **readings)):  # type: ignore[arg-type]
        forget()
        backend, device = open_backend("kunlun")
        assert open_questions.ask("transfer_row_granularity", device).proven == (16, 656, 1152)
        transfer = backend.offers("uva_sparse_gather", device)[1]
        assert transfer.supports(Need("uva_sparse_gather", "t", {"row_bytes": 1152}))
        refusal = transfer.supports(Need("uva_sparse_gather", "t", {"row_bytes": 132}))
        assert "132 bytes are not among the proven sizes" in refusal.reason
    forget()


def test_every_question_is_answered_or_says_why_not(chip: kunlun_emulator.STATE.__class__) -> None:
    _, device = open_backend("kunlun")
    for question, answer in open_questions.answer_all(device):
        assert question.question.endswith((".", "?"))
        assert question.decides
        assert answer.ok or answer.detail.startswith("not answered"), f"{question.name}: {answer.detail}"


def test_gates_name_the_ops_that_ask(chip: kunlun_emulator.STATE.__class__) -> None:
    backend, device = open_backend("kunlun")
    asked: dict[str, set[str]] = {name: set() for name in open_questions.QUESTIONS}
    for op in backend.implemented & set(OP_NAMES):
        open_questions.forget()
        backend.offers(op, device)
        for name, _ in open_questions._answers:
            asked[name].add(op)
    assert asked == {name: set(question.gates) for name, question in open_questions.QUESTIONS.items()}


def test_a_probe_that_raises_is_an_answer() -> None:
    device = DeviceInfo("kunlun", "cpu", "no vendor modules here", {"emulated": True})
    forget()
    answer = open_questions.ask("sparse_lists", device)
    assert not answer.ok
    assert "kunlun_ops" in answer.detail
    forget()
