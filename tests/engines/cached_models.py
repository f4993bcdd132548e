"""Models of the engine tests are made once and cached, each by a process of its own."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from baige_device.cli.demo_model import default_cache_dir, prepare_transformers, publish
from tests.engines.drivers import run_module

__all__ = ["cached", "publish_model"]

PATIENCE_S = 600


def cached(name: str, module: str, *arguments: str) -> Path:
    """Directory `name` of the model cache, made by `python -m MODULE ARGUMENTS` if it is not there.

    A new interpreter, since transformers wants the host prepared in a way that SGLang's tests do otherwise. Of
    several test runs one makes the model and the others wait.
    """
    target = default_cache_dir() / "models" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                done = run_module(module, *arguments, variables=os.environ, timeout_s=PATIENCE_S, new_interpreter=True)
                assert done.status == 0, done.log[-6000:]
    return target


def publish_model(name: str, make: Callable[[Path], None]) -> None:
    """Make directory `name` of the model cache in this process; it appears only when complete."""
    prepare_transformers()
    with publish(default_cache_dir() / "models" / name) as unfinished:
        make(unfinished)
