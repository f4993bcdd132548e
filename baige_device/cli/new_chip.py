"""`baige-device new-chip NAME`: an outside distribution for a new chip, with one op, ready to pass conformance."""

from __future__ import annotations

import os
import re
import shutil
import string
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baige_device.registry.manager import sources

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["new_chip", "scaffold"]

_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")
_RESERVED = ("auto", "off", "none")


def new_chip(
    name: Annotated[str, typer.Argument(help="The chip's name: lower-case letters, digits, underscores.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Where to write; default ./baige-NAME.")] = None,
) -> None:
    """Scaffold a backend distribution for a new chip: probe, one op, entry point, conformance test, README."""
    target = directory or Path(f"baige-{name}")
    try:
        files = scaffold(name, target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lines = sum(path.read_text().count("\n") for path in files)
    typer.echo(f"{target}: {len(files)} files, {lines} lines. Next:")
    # pip takes a bare folder name for a package of the index.
    typer.echo(f"  pip install {os.path.join(os.curdir, target)}")
    typer.echo(f"  {name.upper()}_SIMULATE=1 baige-device conformance --backend {name}")


def scaffold(name: str, target: Path) -> list[Path]:
    """Write the distribution into `target`, which must not exist or be empty; returns the files written.

    Raises:
        ValueError: a name that is no identifier, is reserved or taken, or a target that holds files. Nothing is
            written then.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name: expected 2 to 31 of a-z, 0-9, _ starting with a letter, got {name!r}")
    if name in _RESERVED or name.startswith("baige"):
        raise ValueError(f"name: {name!r} is reserved, like {', '.join(_RESERVED)} and all that begins with 'baige'")
    taken = {source.name: source.origin for source in sources()}
    if name in taken:
        raise ValueError(f"name: {name!r} is taken by {taken[name]}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--dir: expected a new or empty folder, got {target}, which holds files")
    package = f"baige_{name}"
    words = {"name": name, "package": package, "upper": name.upper(), "title": name.title().replace("_", "")}
    template = resources.files("baige_device.cli") / "new_chip_template"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        written = [path.relative_to(folder) for path in _fill(template, Path(folder), package, words)]
        shutil.copytree(folder, target, dirs_exist_ok=True)
    return [target / path for path in written]


def _fill(template: Traversable, target: Path, package: str, words: dict[str, str]) -> list[Path]:
    written = []
    target.mkdir(exist_ok=True)
    for item in sorted(template.iterdir(), key=lambda entry: entry.name):
        if item.is_dir():
            written += _fill(item, target / (package if item.name == "package" else item.name), package, words)
        elif item.name.endswith(".txt"):
            path = target / item.name.removesuffix(".txt")
            path.write_text(string.Template(item.read_text()).substitute(words))
            written.append(path)
    return written
