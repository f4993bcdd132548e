"""docs/kunlun.md names every limit with its value, every probe, and every op."""

from __future__ import annotations

from pathlib import Path

from baige_device.backends.kunlun import limits, open_questions
from baige_device.ops import OP_NAMES

_PAGE = (Path(__file__).resolve().parents[3] / "docs" / "kunlun.md").read_text()


def test_limits() -> None:
    for name, limit in limits.ALL.items():
        assert f"| `{name}` | {limit.value} | {limit.unit} | {limit.source} | {limit.effect} |" in _PAGE


def test_probes() -> None:
    for question in open_questions.QUESTIONS.values():
        assert f"| `{question.name}` | {question.question} | {question.decides} |" in _PAGE


def test_ops() -> None:
    for op in OP_NAMES:
        assert f"`{op}`" in _PAGE
