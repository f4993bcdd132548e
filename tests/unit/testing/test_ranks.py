"""Multi-rank runs notice what one rank cannot show, and a rank that deserts a collective hangs nobody."""

from __future__ import annotations

from baige_device.testing.ranks import RankOptions, run_ranks


def test_a_gather_that_is_wrong_on_two_ranks_only() -> None:
    options = RankOptions("broken", 2, 3, "tests.unit.testing.plugins:misordered_gather", ops=("fp8_all_gather",))
    outcomes = {outcome.case: outcome for outcome in run_ranks(options)}
    assert outcomes["ranks-even[2]"].status == "failed"
    assert outcomes["ranks-even[2]"].reason.startswith("rank 0: Mismatch: image")
    assert outcomes["ranks-all-empty[2]"].status == "passed"


def test_a_deserting_rank_is_a_failure_not_a_hang() -> None:
    options = RankOptions(
        "broken", 2, 3, "tests.unit.testing.plugins:deserting_dispatch", ops=("moe_dispatch",), case_timeout_s=2
    )
    outcomes = run_ranks(options, timeout_s=120)
    assert {outcome.status for outcome in outcomes} <= {"failed", "skipped"}
    assert any("rank 1 gives up" in outcome.reason or "rank 0" in outcome.reason for outcome in outcomes)
