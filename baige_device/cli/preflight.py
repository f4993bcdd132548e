"""What a command checks before its work, so that a slip ends it at once, with a line instead of a trace."""

from __future__ import annotations

import os
from pathlib import Path

import typer

__all__ = ["check_output", "require_torch"]


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written.

    Raises:
        typer.BadParameter: `path` is a folder, its folder does not exist, or one of them is read-only.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise typer.BadParameter(f"{option}: expected a file in a folder that exists, got {path}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{option}: expected a file that can be written, got {path}")


def require_torch(command: str) -> None:
    """Leave with status 2 and one line on stderr where torch cannot be imported. Imports torch."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        typer.echo(f"{command}: needs torch, which cannot be imported: {error}", err=True)
        raise typer.Exit(2) from error
