"""The `baige-device` command: `doctor`, `conformance`, `bench`, `demo`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from baige_device.cli.app import app

    app()
