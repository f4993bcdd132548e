"""The ledger against the installed vLLM: every target exists, and what is mounted are exactly the rows."""

from __future__ import annotations

from baige_device.engines.vllm.ledger import LEDGER
from tests.engines.vllm.engine import run


def test_rows_and_mounts_are_the_same() -> None:
    answer = run("mounts", BAIGE_BACKEND="reference").answer
    states = {state["row"]["target"]: state for state in answer["states"]}
    assert set(states) == {row.target for row in LEDGER.rows}
    missing = {target: state["error"] for target, state in states.items() if state["applies"] and not state["exists"]}
    assert missing == {}
    assert answer["applied"] == sorted(target for target, state in states.items() if state["applies"])


def test_every_patch_says_when_it_can_go() -> None:
    assert [row.target for row in LEDGER.rows if row.kind == "patch" and not row.remove_when] == []
