"""`baige-device bench`: verify, time, compare with peers and with what this machine can do at most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baige_device.cli.preflight import check_output, require_torch

if TYPE_CHECKING:
    from baige_device.cli.bench_report import Result

__all__ = ["bench"]


def bench(
    op: Annotated[list[str] | None, typer.Argument(help="Ops to time; none means all that have benchmarks.")] = None,
    cases: Annotated[Path, typer.Option(help="Folder with the benchmark files, `bench_*.py`.")] = Path("benchmarks"),
    match: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write .json and .png here; a path without suffix.")] = None,
) -> None:
    """Time ops on this machine's GPU.

    Every case is verified before it is timed; a wrong result stops the run with exit status 1. Times are medians of
    CUDA graph replays. Peers run on the same inputs in the same process. Exit status 2: no GPU, no torch, or nothing to
    time. The benchmark files are in the repository, not in the wheel.
    """
    if not any(cases.glob("bench_*.py")):
        typer.echo(
            f"bench: --cases: expected a folder with bench_*.py, got {cases}; they are in the repository, not in the "
            "wheel: run in a checkout, or pass --cases",
            err=True,
        )
        raise typer.Exit(2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_output("--out", out.with_suffix(".json"))
    require_torch("bench")
    import torch

    from baige_device.cli.bench_report import Report, collect, environment, print_row
    from baige_device.cli.bench_timing import measure_limits

    if not torch.cuda.is_available():
        typer.echo("bench: expected a CUDA device, found none", err=True)
        raise typer.Exit(2)
    limits = measure_limits()
    typer.echo(
        f"limits: host link {limits.link / 1e9:.1f} GB/s, device copy {limits.copy / 1e12:.2f} TB/s, "
        f"bf16 product {limits.matmul / 1e12:.0f} TFLOP/s"
    )
    results: list[Result] = []
    try:
        for result in collect(cases, op or [], match, limits):
            results.append(result)
            print_row(result)
    except AssertionError as error:
        typer.echo(f"bench: wrong result: {error}", err=True)
        raise typer.Exit(1) from error
    if not results:
        typer.echo(f"bench: no case in {cases} matches", err=True)
        raise typer.Exit(2)
    if out is not None:
        Report(environment(), limits, results).write(out)
