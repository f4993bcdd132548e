"""The typer application: one command a file."""

from __future__ import annotations

import logging

import typer

from baige_device import __version__
from baige_device.cli.bench import bench
from baige_device.cli.conformance import conformance
from baige_device.cli.demo import demo
from baige_device.cli.doctor import doctor
from baige_device.cli.new_chip import new_chip

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="baige-device: one op registry, any chip, both vLLM and SGLang.",
)
for command in (doctor, conformance, bench, demo):
    app.command()(command)
app.command("new-chip")(new_chip)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"baige-device {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what baige-device decides."),
) -> None:
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(message)s")
