"""`baige-device conformance`: run the op contracts' test matrix against a backend and write the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baige_device.cli.preflight import check_output, require_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baige_device.testing.measure import Measurement
    from baige_device.testing.report import Report
    from baige_device.testing.runner import Outcome, Runner

__all__ = ["conformance"]


def conformance(
    backend: Annotated[str, typer.Option(help="The backend to test, by its entry-point name.")] = "reference",
    plugin: Annotated[
        str, typer.Option(metavar="MODULE[:ATTRIBUTE]", help="Load the backend from here instead of an entry point.")
    ] = "",
    op: Annotated[list[str] | None, typer.Option(help="Test this op only; may be given several times.")] = None,
    tier: Annotated[
        str, typer.Option(help="Test one tier alone: tuned, portable or reference. Default: the best for each need.")
    ] = "",
    device: Annotated[str, typer.Option(help="torch device, such as cuda:1. Default: the one the probe names.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the random inputs; -1 draws a fresh one.")] = -1,
    ranks: Annotated[int, typer.Option(min=1, help="Run the collective ops on this many processes too.")] = 1,
    share_device: Annotated[
        bool, typer.Option(help="Put all ranks on one device (transports between processes).")
    ] = False,
    large: Annotated[bool, typer.Option(help="Run the cases beyond 2^31 bytes too.")] = False,
    measure: Annotated[bool, typer.Option(help="Time one call per op against this machine's measured limits.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a Markdown report here, and the JSON beside it (.json).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    allow_refused: Annotated[
        bool, typer.Option("--allow-refused/--forbid-refused", help="Whether a refused case still exits with 0.")
    ] = True,
) -> None:
    """Test a backend against every op contract.

    Exit status 0: something passed and nothing failed. 1: a case failed (or was refused, with --forbid-refused).
    2: the backend cannot be loaded, torch is missing, or an option is wrong. An op that is not offered is `absent`.
    """
    if report is not None and report.suffix == ".json":
        raise typer.BadParameter(f"--report: expected a Markdown file (.md), got {report}")
    check_output("--report", report)
    require_torch("conformance")
    finished = _run(backend, plugin, op or [], tier, device, seed, ranks, share_device, large, measure)
    if report is not None:
        report.write_text(finished.markdown() + "\n", encoding="utf-8")
        report.with_suffix(".json").write_text(finished.json() + "\n", encoding="utf-8")
    if as_json:
        typer.echo(finished.json())
    else:
        _render(finished, Console())
    refused = finished.total("refused") > 0 and not allow_refused
    raise typer.Exit(1 if refused or not finished.ok else 0)


def _run(
    backend: str,
    plugin: str,
    ops: list[str],
    tier: str,
    device: str,
    seed: int,
    ranks: int,
    share_device: bool,
    large: bool,
    measure: bool,
) -> Report:
    from baige_device.errors import BackendError
    from baige_device.testing.ranks import RankOptions, run_ranks
    from baige_device.testing.report import make_report
    from baige_device.testing.runner import Runner, fresh_seed, open_backend

    seed = fresh_seed() if seed < 0 else seed
    try:
        loaded, info = open_backend(backend, plugin)
        runner = Runner(loaded, info, seed=seed, tier=tier, large=large, torch_device=device)
        if device:
            _use(device)
        outcomes = _with_progress(f"{backend} (seed {seed})", _case_count(ops), lambda done: runner.run_all(ops, done))
    except (BackendError, KeyError, ValueError) as error:
        message = error.args[0] if isinstance(error, KeyError) else error  # str() of a KeyError adds quotes
        typer.echo(f"conformance: {message}", err=True)
        raise typer.Exit(2) from error
    if ranks > 1:
        options = RankOptions(backend, ranks, seed, plugin, tier, tuple(ops), device, share_device)
        outcomes += _with_progress(f"{ranks} ranks", _rank_case_count(ops), lambda done: run_ranks(options, done))
    return make_report(
        outcomes,
        backend=backend,
        origin=loaded.origin,
        device=info.name,
        tier=tier,
        seed=seed,
        ranks=ranks,
        measurements=_measure(runner, ops) if measure else (),
    )


def _use(device: str) -> None:
    """Raise `ValueError` unless a tensor can be made on the device that `--device` names."""
    import torch

    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch's own, a chip's plugin's, or AssertionError of a build without the device
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"device: {device!r} cannot be used here: {type(error).__name__}: {first}") from error


def _case_count(ops: list[str]) -> int:
    from baige_device.testing.cases import all_cases

    return len(all_cases(ops))


def _rank_case_count(ops: list[str]) -> int:
    from baige_device.testing.cases import rank_cases

    return len(rank_cases(ops))


def _measure(runner: Runner, ops: list[str]) -> Sequence[Measurement]:
    from baige_device.testing.measure import measure

    return measure(runner, ops)


def _with_progress(title: str, total: int, run: Callable[[Callable[[Outcome], None]], list[Outcome]]) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(title), total=total)
        return run(lambda outcome: progress.advance(task))


def _render(report: Report, console: Console) -> None:
    console.print(report.table())
    for line in report.reasons():
        console.print(escape(line), highlight=False, soft_wrap=True)
    if report.measurements:
        console.print(report.measured_table())
    console.print(escape(report.summary()), style="green" if report.ok else "red", highlight=False, soft_wrap=True)
