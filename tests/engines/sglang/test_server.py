"""The OpenAI server, started as a user starts it: exact tokens, answers, streams, shows its record and its metrics."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from baige_device.cli.demo_server import DemoServer, free_port
from tests.engines.sglang.engine import environment
from tests.engines.tiny_models import OUTPUT_TOKENS, expected_cases, model_path

LAYERS = 30


def test_server_is_exact_answers_and_streams(tmp_path: Path) -> None:
    port, metrics = free_port(), free_port()
    model = model_path("smollm2")
    cases = expected_cases(model)
    assert len(cases) == 5
    assert max(len(case["prompt"]) for case in cases) >= 700  # in chunks of 256
    arguments = [
        *("-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "smollm2"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--mem-fraction-static", "0.3"),
        *("--max-total-tokens", "4096", "--max-running-requests", "8", "--chunked-prefill-size", "256"),
        "--skip-server-warmup",
    ]
    settings = {"BAIGE_BACKEND": "reference", "BAIGE_CHECKS": "values", "BAIGE_METRICS_PORT": str(metrics)}
    log = tmp_path / "server.log"
    with DemoServer(arguments, environment(settings), port, log) as server:
        server.wait_until_healthy(240)
        generated = post(port, "/generate", input_ids=[case["prompt"] for case in cases], sampling_params=greedy())
        pieces = list(server.ask("What is the capital of France?", "smollm2", 24))
        whole = post(
            port, "/v1/completions", model="smollm2", prompt="The capital of France is", max_tokens=8, temperature=0
        )
        calls = server.op_calls(metrics)
        (state,) = get(port, "/server_info")["internal_states"]
    assert [answer["output_ids"] for answer in generated] == [case["output"] for case in cases]
    assert len(pieces) > 3
    assert "Paris" in "".join(pieces)
    assert "Paris" in whole["choices"][0]["text"]
    assert {op for op, count in calls.items() if count} == {"attend_paged", "kv_write"}
    assert calls["kv_write"] == 2 * calls["attend_paged"]
    assert calls["attend_paged"] % LAYERS == 0
    assert calls["attend_paged"] >= LAYERS * OUTPUT_TOKENS
    assert state["baige_device"]["calls"] == calls
    assert state["baige_device"]["record"]["backend"] == "reference"
    assert state["baige_device"]["record"]["engine"].startswith("sglang 0.5.")
    text = log.read_text()
    assert "baige-device active: backend reference" in text
    # Tracebacks of SGLang's own are usual: a request to itself before it listens, and the interrupt at the end.
    for trouble in ("Scheduler hit an exception", "Failed to execute general plugin", "Failed to apply hooks"):
        assert trouble not in text


def greedy() -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}


def post(port: int, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return json.load(answer)
