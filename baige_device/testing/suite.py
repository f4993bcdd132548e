"""The pytest face of the kit: subclass `BackendConformance`, name the backend, run pytest. Nothing to register.

from baige_device.testing import BackendConformance

class TestAcme(BackendConformance):
    backend = "acme"
    skip = {"attend_paged/window-*": "acme has no sliding window before firmware 2.1"}
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from baige_device.testing.cases import Case, all_cases
from baige_device.testing.ranks import RankOptions, run_ranks
from baige_device.testing.runner import Outcome, Runner, fresh_seed, open_backend

if TYPE_CHECKING:
    import pytest

__all__ = ["BackendConformance"]


class BackendConformance:
    """One test per case of the matrix, for the backend that a subclass names.

    A case that the backend refuses (its `supports` says no) or an op that it does not offer is a skip with the reason,
    never a pass. A failing test prints the seed; set `seed` to repeat it.
    """

    backend: ClassVar[str]
    """The backend's entry-point name."""
    plugin: ClassVar[str] = ""
    """`module:attribute` of a plugin that is not installed as an entry point."""
    device: ClassVar[str] = ""
    """torch device, such as `cuda:1`; empty for the one that the probe names."""
    tier: ClassVar[str] = ""
    """Test this tier alone: `tuned`, `portable` or `reference`; empty for the best that serves each need."""
    ops: ClassVar[Sequence[str]] = ()
    """Only these ops; empty for all."""
    ranks: ClassVar[Sequence[int]] = ()
    """Group sizes for the multi-rank cases, such as (2, 3); they run in spawned processes."""
    large: ClassVar[bool] = False
    """Run the cases beyond 2^31 bytes too."""
    skip: ClassVar[Mapping[str, str]] = {}
    """Pattern of `op/case` -> why it cannot run here."""
    seed: ClassVar[int | None] = None
    """None draws a fresh one."""

    _runner: ClassVar[Runner | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per case, and one per group size."""
        if "conformance_case" in metafunc.fixturenames:
            cases = all_cases(self.ops)
            metafunc.parametrize("conformance_case", cases, ids=[case.name for case in cases])
        if "conformance_ranks" in metafunc.fixturenames:
            metafunc.parametrize("conformance_ranks", list(self.ranks))

    def test_case(self, conformance_case: Case) -> None:
        """The op does what its contract says."""
        _skip_listed(self.skip, conformance_case.name)
        runner = self._get_runner()
        _judge([runner.run(conformance_case)], runner.seed)

    def test_ranks(self, conformance_ranks: int) -> None:
        """The collective ops do what their contracts say on several ranks."""
        seed = self._get_runner().seed
        options = RankOptions(
            self.backend, conformance_ranks, seed, self.plugin, self.tier, tuple(self.ops), self.device
        )
        outcomes = run_ranks(options)
        listed = [outcome for outcome in outcomes if not _reason_to_skip(self.skip, f"{outcome.op}/{outcome.case}")]
        _judge(listed, seed)

    @classmethod
    def _get_runner(cls) -> Runner:
        if "_runner" not in cls.__dict__ or cls._runner is None:
            backend, device = open_backend(cls.backend, cls.plugin)
            seed = fresh_seed() if cls.seed is None else cls.seed
            cls._runner = Runner(backend, device, seed=seed, tier=cls.tier, large=cls.large, torch_device=cls.device)
        return cls._runner


def _reason_to_skip(skip: Mapping[str, str], name: str) -> str:
    return next((reason for pattern, reason in skip.items() if fnmatch.fnmatchcase(name, pattern)), "")


def _skip_listed(skip: Mapping[str, str], name: str) -> None:
    import pytest

    reason = _reason_to_skip(skip, name)
    if reason:
        pytest.skip(reason)


def _judge(outcomes: Sequence[Outcome], seed: int) -> None:
    import pytest

    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        lines = [f"{outcome.op}/{outcome.case} ({outcome.tier or 'no'} tier): {outcome.reason}" for outcome in failed]
        trace = failed[0].trace
        pytest.fail("\n".join([*lines, f"seed {seed}", trace]), pytrace=False)
    if outcomes and all(outcome.status != "passed" for outcome in outcomes):
        pytest.skip(f"{outcomes[0].status}: {outcomes[0].reason}")
