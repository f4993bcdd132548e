"""How outcomes are judged: absent, refused, skipped, failed; tiers; and the needs that cases state."""

from __future__ import annotations

import pytest

from baige_device.errors import BackendError
from baige_device.ops import OP_NAMES
from baige_device.testing.cases import SUITES, Case, all_cases, rank_cases
from baige_device.testing.needs import NEED_KEYS, case_need
from baige_device.testing.runner import Outcome, Runner, merge_ranks, open_backend

PLUGIN = "tests.unit.testing.plugins:partial_backend"


@pytest.fixture(scope="module")
def runner() -> Runner:
    backend, device = open_backend("acme", PLUGIN)
    return Runner(backend, device, seed=5)


def _outcomes(runner: Runner, op: str) -> list[Outcome]:
    return runner.run_all([op])


def test_every_op_has_a_suite() -> None:
    assert set(SUITES) == set(OP_NAMES)
    assert {case.op for case in all_cases()} == set(OP_NAMES)
    assert {case.op for case in rank_cases()} == {"fp8_all_gather", "moe_dispatch", "moe_combine"}


def test_every_op_checks_bad_inputs() -> None:
    checked = {case.op for case in all_cases() if "checked" in case.tags}
    assert checked == set(OP_NAMES)


def test_needs_use_the_closed_vocabulary() -> None:
    used = {key for case in [*all_cases(), *rank_cases()] for need in case.needs() for key in need.params}
    assert used == set(NEED_KEYS), "a key that no case states is a key that no case tests"
    with pytest.raises(ValueError, match="unknown keys \\['head_dim'\\]"):
        case_need("attend_paged", "x", {"head_dim": 64})


def test_an_op_without_an_offer_is_absent(runner: Runner) -> None:
    outcomes = _outcomes(runner, "sparse_attention")
    assert {outcome.status for outcome in outcomes} == {"absent"}
    assert outcomes[0].reason == "acme offers no sparse_attention"


def test_refusals_carry_their_reason(runner: Runner) -> None:
    outcomes = _outcomes(runner, "attend_paged")
    refused = [outcome for outcome in outcomes if outcome.status == "refused"]
    assert {outcome.case for outcome in refused} >= {"head-size-192-128", "mla-decode-bfloat16"}
    assert all("head_size" in outcome.reason and "> 128" in outcome.reason for outcome in refused)
    assert {outcome.status for outcome in outcomes} == {"refused", "passed", "skipped"}


def test_a_missing_library_symbol_is_a_refusal(runner: Runner) -> None:
    outcomes = [outcome for outcome in _outcomes(runner, "kv_write") if outcome.status != "skipped"]
    assert {outcome.status for outcome in outcomes} == {"refused"}
    assert "libacme.so has no acme_kv_write" in outcomes[0].reason


def test_an_op_that_cannot_be_loaded_fails(runner: Runner) -> None:
    outcomes = [outcome for outcome in _outcomes(runner, "index_topk") if outcome.status != "skipped"]
    assert {outcome.status for outcome in outcomes} == {"failed"}
    assert "ModuleNotFoundError" in outcomes[0].reason


def test_a_missing_partner_op_is_a_refusal(runner: Runner) -> None:
    outcomes = _outcomes(runner, "moe_combine")
    assert {(outcome.status, outcome.reason) for outcome in outcomes} == {("refused", "acme offers no moe_dispatch")}


def test_the_best_tier_that_serves_the_need_is_tested(runner: Runner) -> None:
    passed = [outcome for outcome in _outcomes(runner, "merge_attention") if outcome.status == "passed"]
    assert passed
    assert {outcome.tier for outcome in passed} == {"portable"}


def test_one_tier_alone() -> None:
    backend, device = open_backend("acme", PLUGIN)
    tuned = Runner(backend, device, seed=5, tier="tuned").run_all(["merge_attention"])
    assert {outcome.status for outcome in tuned} == {"refused", "skipped"}
    reference = Runner(backend, device, seed=5, tier="reference").run_all(["merge_attention"])
    assert {outcome.status for outcome in reference} == {"absent"}
    assert reference[0].reason == "acme offers no reference merge_attention"
    with pytest.raises(ValueError, match="tier: expected"):
        Runner(backend, device, seed=5, tier="fast")


def test_a_refusal_by_the_call_is_a_failure() -> None:
    from tests.unit.testing.mutants import MUTANTS, broken_source

    source = broken_source("kv_write", MUTANTS["kv_write", "refuses_when_called"])
    backend, device = open_backend("broken", candidates=[source])
    outcome = Runner(backend, device, seed=5).run(all_cases(["kv_write"])[0])
    assert outcome.status == "failed"
    assert "refused by the call instead of by supports()" in outcome.reason


def test_large_graph_and_stream_cases_are_skipped_with_a_reason(runner: Runner) -> None:
    backend, device = open_backend("reference")
    outcomes = Runner(backend, device, seed=5).run_all(["kv_write"])
    reasons = {outcome.reason for outcome in outcomes if outcome.status == "skipped"}
    assert reasons == {"large: not asked for (--large)", "torch device 'cpu' has no graphs and streams"}


def test_the_same_seed_draws_the_same_inputs() -> None:
    backend, device = open_backend("reference")
    seen = []

    def look(lab: object) -> float:
        seen.append(lab.normal(4).tolist())  # type: ignore[attr-defined]
        return 0.0

    case = Case("kv_write", "look", look)
    for seed in (1, 1, 2):
        Runner(backend, device, seed=seed).run(case)
    assert seen[0] == seen[1] != seen[2]


def test_the_worst_rank_decides() -> None:
    good, bad = Outcome("kv_write", "a", "passed", worst_error=0.5), Outcome("kv_write", "a", "failed", reason="no")
    assert merge_ranks([good, bad]).status == "failed"
    assert merge_ranks([good, bad]).reason == "rank 1: no"
    assert merge_ranks([good, good]).worst_error == 0.5


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BackendError, match="expected one of"):
        open_backend("no-such-chip")
    with pytest.raises(BackendError, match="is broken"):
        open_backend("acme", "baige_device.no_such_module")
    with pytest.raises(KeyError, match="unknown op attend"):
        all_cases(["attend"])
