"""The OpenAI server, started as a user starts it, answers and streams on the reference backend."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from baige_device.cli.demo_server import DemoServer, free_port
from tests.engines.tiny_models import model_path
from tests.engines.vllm.engine import environment


def test_server_answers_and_streams(tmp_path: Path) -> None:
    port, metrics = free_port(), free_port()
    arguments = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path("smollm2"))),
        *("--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "1024", "--additional-config", json.dumps({"baige": {"metrics_port": metrics}})),
    ]
    log = tmp_path / "server.log"
    with DemoServer(arguments, environment({"BAIGE_BACKEND": "reference"}), port, log) as server:
        server.wait_until_healthy(200)
        pieces = list(server.ask("What is the capital of France?", "smollm2", 24))
        whole = complete(port)
        calls = server.op_calls(metrics)
        # Read before the stop: vLLM may report its own engine as dead while it shuts down.
        assert "Traceback" not in log.read_text()
    assert len(pieces) > 3
    assert "Paris" in "".join(pieces)
    assert "Paris" in whole
    assert calls["attend_paged"] > 0
    assert calls["kv_write"] > 0
    text = log.read_text()
    assert "baige-device active: backend reference" in text
    assert "rank 0 op calls: attend_paged" in text


def complete(port: int) -> str:
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text
