"""The outcome of a run as a table on the terminal, as JSON, and as a Markdown page that a vendor publishes."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from baige_device.ops import OP_NAMES
from baige_device.record import installed_versions
from baige_device.testing.measure import Measurement
from baige_device.testing.runner import Outcome

__all__ = ["OpSummary", "Report", "make_report"]


@dataclass(frozen=True)
class OpSummary:
    """All outcomes of one op."""

    op: str
    outcomes: Sequence[Outcome]

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def offered(self) -> bool:
        """False when every case is absent: the backend does not have this op."""
        return any(outcome.status != "absent" for outcome in self.outcomes)

    @property
    def tiers(self) -> dict[str, int]:
        """Cases that ran, by tier."""
        found: dict[str, int] = {}
        for outcome in self.outcomes:
            if outcome.tier:
                found[outcome.tier] = found.get(outcome.tier, 0) + 1
        return found

    @property
    def worst_error(self) -> float | None:
        """Largest error of the passed cases; None when none passed."""
        passed = [outcome.worst_error for outcome in self.outcomes if outcome.status == "passed"]
        return max(passed, default=None)

    def reasons(self, status: str) -> dict[str, list[str]]:
        """Reason -> cases."""
        found: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.status == status:
                found.setdefault(outcome.reason, []).append(outcome.case)
        return found

    def as_dict(self) -> dict[str, Any]:
        worst = self.worst_error
        return {
            "offered": self.offered,
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "refused": _listed(self.outcomes, "refused"),
            "worst_error": worst if worst is None or math.isfinite(worst) else None,
            "skipped": _listed(self.outcomes, "skipped"),
            "failures": _listed(self.outcomes, "failed"),
            "tiers": self.tiers,
            "absent": next(iter(self.reasons("absent")), ""),
        }


@dataclass(frozen=True)
class Report:
    """A finished run."""

    backend: str
    origin: str
    device: str
    tier: str
    seed: int
    ranks: int
    date: str
    versions: dict[str, str]
    ops: dict[str, OpSummary]
    measurements: Sequence[Measurement] = field(default_factory=tuple)

    def total(self, status: str) -> int:
        return sum(op.count(status) for op in self.ops.values())

    @property
    def ok(self) -> bool:
        """Nothing failed and something passed."""
        return self.total("failed") == 0 and self.total("passed") > 0

    def summary(self) -> str:
        """One line with every count."""
        absent = [name for name, op in self.ops.items() if not op.offered]
        counts = ", ".join(f"{self.total(status)} {status}" for status in ("passed", "failed", "refused", "skipped"))
        tail = f"; absent: {', '.join(absent)}" if absent else ""
        verdict = "conforms" if self.ok else "does not conform" if self.total("failed") else "was not tested"
        return f"{self.backend} {verdict}: {counts}{tail} (seed {self.seed})"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, in plain values.

        `ops` maps each tested op to: `offered`, `passed`, `failed`, `refused` ([{case, reason}]), `worst_error` (of the
        passed cases, null if none), `skipped` and `failures` (like `refused`), `tiers` (tier -> cases run) and `absent`
        (why the op is not offered, else empty). `measurements` is [{op, case, us, limit, percent}].
        """
        return {
            "backend": self.backend,
            "ops": {name: op.as_dict() for name, op in self.ops.items()},
            "ok": self.ok,
            "origin": self.origin,
            "device": self.device,
            "tier": self.tier or "best",
            "seed": self.seed,
            "ranks": self.ranks,
            "date": self.date,
            "versions": self.versions,
            "measurements": [measurement.as_dict() for measurement in self.measurements],
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def table(self) -> Table:
        """For the terminal."""
        title = f"conformance of {self.backend} on {self.device}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
        for name in ("op", "tier", "cases", "passed", "refused", "skipped", "failed", "worst"):
            table.add_column(name, justify="left" if name in ("op", "tier") else "right", no_wrap=True)
        for op in self.ops.values():
            style = "red" if op.count("failed") else "dim" if not op.offered else ""
            table.add_row(*_cells(op), style=style)
        return table

    def reasons(self) -> list[str]:
        """One line per failure, refusal and absence, with how many cases share it."""
        lines = []
        for status in ("failed", "refused", "absent"):
            for op in self.ops.values():
                for reason, cases in op.reasons(status).items():
                    more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
                    where = op.op if status == "absent" else f"{op.op}/{cases[0]}{more}"
                    lines.append(f"{status}: {where}: {reason}")
        return lines

    def measured_table(self) -> Table:
        """Timings for the terminal."""
        table = Table(
            "op",
            "case",
            "time (us)",
            "limit",
            "percent",
            title="share of this machine's measured limits",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 0),
        )
        for item in self.measurements:
            table.add_row(item.op, item.case, f"{item.us:.1f}", item.limit, f"{item.percent:.1f}")
        return table

    def markdown(self) -> str:
        """A page to publish."""
        lines = [
            f"# Conformance of `{self.backend}` on {self.device}",
            "",
            self.summary(),
            "",
            f"- date: {self.date}",
            f"- plugin: {self.origin}",
            f"- tier: {self.tier or 'best offered for each need'}; ranks: {self.ranks}",
            f"- versions: {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
            "",
            "| op | tier | cases | passed | refused | skipped | failed | worst error |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(f"| {' | '.join(_cells(op))} |" for op in self.ops.values()),
            "",
        ]
        for status, title in (
            ("failed", "Failures"),
            ("refused", "Refusals"),
            ("skipped", "Skipped"),
            ("absent", "Absent"),
        ):
            lines += _reason_section(self.ops, status, title)
        if self.measurements:
            lines += _measured_section(self.measurements)
        return "\n".join(lines)


def make_report(
    outcomes: Sequence[Outcome],
    *,
    backend: str,
    origin: str,
    device: str,
    tier: str,
    seed: int,
    ranks: int,
    measurements: Sequence[Measurement] = (),
) -> Report:
    """Sort the outcomes by op and add where and when they were found."""
    by_op = {op: [outcome for outcome in outcomes if outcome.op == op] for op in OP_NAMES}
    ops = {op: OpSummary(op, found) for op, found in by_op.items() if found}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    versions = {**installed_versions(("torch", "triton")), "system": platform.platform()}
    return Report(backend, origin, device, tier, seed, ranks, date, versions, ops, measurements)


def _cells(op: OpSummary) -> list[str]:
    if not op.offered:
        return [op.op, "absent", str(len(op.outcomes)), "", "", "", "", ""]
    tiers = ", ".join(op.tiers) or "none"
    counts = [str(op.count(status)) for status in ("passed", "refused", "skipped", "failed")]
    worst = op.worst_error
    error = "" if worst is None else "exact" if worst == 0 else f"{worst:.2g}"
    return [op.op, tiers, str(len(op.outcomes)), *counts, error]


def _listed(outcomes: Sequence[Outcome], status: str) -> list[dict[str, str]]:
    return [{"case": outcome.case, "reason": outcome.reason} for outcome in outcomes if outcome.status == status]


def _reason_section(ops: dict[str, OpSummary], status: str, title: str) -> list[str]:
    lines = []
    for op in ops.values():
        for reason, cases in op.reasons(status).items():
            where = (
                op.op
                if status == "absent"
                else f"{op.op} ({len(cases)}: {', '.join(cases[:4])}{', ...' * (len(cases) > 4)})"
            )
            lines.append(f"- {where}: {' '.join(reason.split())}")
    return [f"## {title}", "", *lines, ""] if lines else []


def _measured_section(measurements: Sequence[Measurement]) -> list[str]:
    lines = [
        "## Share of the chip's measured limits",
        "",
        "| op | case | time (us) | limit | percent |",
        "| --- | --- | ---: | --- | ---: |",
    ]
    lines += [
        f"| {item.op} | {item.case} | {item.us:.1f} | {item.limit} | {item.percent:.1f} |" for item in measurements
    ]
    return [*lines, ""]
