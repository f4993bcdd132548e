"""`baige-device demo`: a real engine, a real model, one question, on the reference backend."""

from __future__ import annotations

import enum
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baige_device.cli.demo_model import default_cache_dir, prepare_smollm2
from baige_device.cli.demo_server import DemoServer, ServerFailed, free_port
from baige_device.errors import BaigeError

__all__ = ["Engine", "MODEL_NAME", "SERVER_ENVIRONMENT", "demo", "server_arguments"]


class Engine(str, enum.Enum):
    """The host engines."""

    vllm = "vllm"
    sglang = "sglang"


_CONTEXT_TOKENS = 2048
MODEL_NAME = "smollm2-135m-instruct"
_QUESTION = "What is the capital of France, and what is it known for?"
SERVER_ENVIRONMENT = {
    "BAIGE_BACKEND": "reference",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}


def demo(
    engine: Annotated[Engine, typer.Option(help="The host engine; it must be installed here.")] = Engine.vllm,
    question: Annotated[str, typer.Option(help="What to ask the model.")] = _QUESTION,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Length of the answer in tokens.")] = 64,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds the server may take to start.")] = 300,
) -> None:
    """Start the engine's own OpenAI server with baige-device mounted, ask a question, and show what ran."""
    console = Console(highlight=False)
    if importlib.util.find_spec(engine.value) is None:
        console.print(
            f"[red]{engine.value} is not installed here[/]; `make demo ENGINE={engine.value}` builds an environment"
        )
        raise typer.Exit(1)
    try:
        _run(engine, question, max_tokens, timeout, console)
    except (BaigeError, FileNotFoundError, ServerFailed) as error:
        console.print("[red]the demo failed[/]:", escape(str(error)), soft_wrap=True)
        raise typer.Exit(1) from error


def _run(engine: Engine, question: str, max_tokens: int, timeout: float, console: Console) -> None:
    model = prepare_smollm2(default_cache_dir())
    port, metrics_port = free_port(), free_port()
    log = Path(tempfile.mkdtemp(prefix="baige-demo-")) / f"{engine.value}.log"
    environment = {**os.environ, **SERVER_ENVIRONMENT, "BAIGE_METRICS_PORT": str(metrics_port)}
    with DemoServer(server_arguments(engine, model, port), environment, port, log) as server:
        with console.status(f"starting {engine.value} (log: {log})"):
            seconds = server.wait_until_healthy(timeout)
        console.print(f"[green]{engine.value} is up[/] after {seconds:.0f} s; log: {log}")
        line = server.activation_line()
        if not line:
            raise ServerFailed("the server is up, but baige-device did not activate in it", log)
        console.print(line, markup=False, soft_wrap=True)
        console.print(f"\n[bold]Q[/] {question}\n[bold]A[/] ", end="")
        for piece in server.ask(question, MODEL_NAME, max_tokens):
            console.print(piece, end="", markup=False, soft_wrap=True)
        console.print("\n")
        calls = server.op_calls(metrics_port)
        console.print(_table(calls))
        with console.status(f"stopping {engine.value}"):
            ended = server.stop()
    if not ended:
        raise ServerFailed("the server did not end when interrupted and was killed", log)
    if not sum(calls.values()):
        raise ServerFailed("the answer did not go through baige-device's ops", log)
    console.print(f"[green]{engine.value} stopped cleanly[/]")


def server_arguments(engine: Engine, model: Path, port: int) -> list[str]:
    """Arguments of `python` that start the engine's OpenAI server on a small machine without an accelerator."""
    if engine is Engine.vllm:
        return [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", str(_CONTEXT_TOKENS), "--max-num-seqs", "4", "--max-num-batched-tokens", "512"),
            *("--kv-cache-memory-bytes", str(1 << 28), "--enforce-eager"),
        ]
    return [
        *("-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--context-length", str(_CONTEXT_TOKENS), "--max-total-tokens", str(2 * _CONTEXT_TOKENS)),
        *("--max-running-requests", "4", "--mem-fraction-static", "0.5", "--skip-server-warmup"),
    ]


def _table(calls: dict[str, int]) -> Table:
    table = Table("op", "calls through the op table")
    for op, count in sorted(calls.items(), key=lambda item: -item[1]):
        if count:
            table.add_row(op, f"{count:,}")
    return table
