"""`baige-device doctor`: what is here, what would be chosen, what would be mounted, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baige_device.cli.diagnosis import Diagnosis, MissingTarget, diagnose
from baige_device.cli.preflight import check_output

__all__ = ["doctor"]

_MARKS = {True: "[green]yes[/]", False: "[red]no[/]", None: "[dim]-[/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    mounts: Annotated[
        bool, typer.Option(help="Import the installed engines and check every mount target (takes some seconds).")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
) -> None:
    """Show what baige-device detects and would do here. Exit status 1 if something that was asked for cannot work."""
    check_output("--output", output)
    diagnosis = diagnose(mounts=mounts)
    text = json.dumps(diagnosis.as_dict(), indent=2, sort_keys=True, default=str)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        _render(diagnosis, Console())
    raise typer.Exit(1 if diagnosis.problems else 0)


def _render(diagnosis: Diagnosis, console: Console) -> None:
    console.print(f"baige-device {diagnosis.versions['baige-device']}", highlight=False)
    console.print(_pairs("Settings", diagnosis.settings))
    console.print(_backends(diagnosis))
    if diagnosis.ops:
        console.print(_ops(diagnosis))
    if diagnosis.findings:
        console.print(_findings(diagnosis))
    console.print(_engines(diagnosis))
    console.print(_pairs("Host memory", diagnosis.host_memory))
    console.print(_pairs("HiSparse", _hisparse(diagnosis.hisparse)))
    for note in diagnosis.notes:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    for problem in diagnosis.problems:
        console.print(f"[red]problem[/] {escape(problem)}", soft_wrap=True)
    if not diagnosis.problems:
        console.print("[green]nothing that was asked for is broken[/]")


def _pairs(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in values.items():
        table.add_row(key, escape(str(value)))
    return table


def _backends(diagnosis: Diagnosis) -> Table:
    table = Table("backend", "from", "hardware", "usable", "reason", title="Backends", title_justify="left")
    for item in diagnosis.backends:
        name = f"[bold]{item['name']}[/]" if item["chosen"] else item["name"]
        table.add_row(
            name, escape(item["origin"]), _MARKS[item["hardware"]], _MARKS[item["usable"]], escape(item["reason"])
        )
    return table


def _ops(diagnosis: Diagnosis) -> Table:
    title = f"Ops on {diagnosis.chosen}"
    table = Table("op", "candidate", "tier", "chosen", "reason", title=title, title_justify="left")
    for op, candidates in diagnosis.ops.items():
        absent = {"candidate": "-", "tier": "-", "chosen": False, "reason": diagnosis.absent.get(op, "")}
        for index, item in enumerate(candidates or [absent]):
            table.add_row(
                op if index == 0 else "",
                item["candidate"],
                item["tier"],
                _MARKS[item["chosen"]],
                escape(item["reason"]),
            )
    return table


def _findings(diagnosis: Diagnosis) -> Table:
    title = f"What only the hardware settles ({diagnosis.chosen})"
    table = Table("question", "ok", "answer", "decides", title=title, title_justify="left")
    for item in diagnosis.findings:
        table.add_row(item["name"], _MARKS[item["ok"]], escape(item["detail"]), escape(item["decides"]))
    return table


def _hisparse(found: dict[str, Any]) -> dict[str, str]:
    rows = {"switched on": "yes" if found["on"] else "no (hisparse.host_gib_per_node is 0)"}
    if found["on"]:
        rows |= {"hot tokens": found["hot_tokens"], "overlap": found["overlap"], "host pool": found["host_pool"]}
        rows |= {f"limit: {name}": text for name, text in found["limits"].items()}
    for op, row in found["ops"].items():
        rows[f"needs {op}"] = f"{row['tier']}: {row['offered_by']}" if row["offered_by"] else f"absent: {row['reason']}"
    return rows


def _engines(diagnosis: Diagnosis) -> Table:
    columns = ("engine", "installed", "window", "platform", "targets", "missing")
    table = Table(*columns, title="Engines", title_justify="left")
    for item in diagnosis.engines:
        missing = "\n".join(_missing(target) for target in item["missing"])
        installed, platform = item["installed"] or "-", escape(item["platform"])
        table.add_row(item["name"], installed, item["accepted"], platform, item["targets"], escape(missing))
    return table


def _missing(missing: MissingTarget) -> str:
    return f"{missing['target']} ({missing['feature']})"
