"""Driver: SGLang under load, with HiSparse or without, and what its pools hold afterwards; prints one JSON object.

    python -m tests.engines.sglang.hisparse MODEL '{"engine option": value, ...}' [aborts] [growth]

All prompts of `expected.json` at once; then once more while some of them are aborted in the middle; then eight that
start within a page and leave it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.engines.sglang.generate import start
from tests.engines.tiny_models import OUTPUT_TOKENS, expected_cases

ABORTED = (3, 5, 7)
"""Prompts whose second run is aborted after some tokens."""
TOKENS_BEFORE_ABORT = 4
PATIENCE_S = 30.0


def main(model: str, options: dict[str, Any], phases: list[str]) -> None:
    prompts = [case["prompt"] for case in expected_cases(Path(model))]
    engine = start(model, {"disable_radix_cache": True, **options})
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    report: dict[str, Any] = {"tokens": _tokens(engine.generate(input_ids=prompts, sampling_params=sampling))}
    if "aborts" in phases:
        report["disturbed"] = engine.loop.run_until_complete(_with_aborts(engine, prompts, sampling))
    if "growth" in phases:
        # All outgrow their first page at once. In a full pool that ends a scheduler which does not count the growth.
        within = [prompts[1][i:] for i in range(8)]
        report["growing"] = _tokens(engine.generate(input_ids=within, sampling_params=sampling))
    report["reports"] = [state["baige_device"] for state in _at_rest(engine)]
    engine.shutdown()
    print("ANSWER " + json.dumps(report), flush=True)


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


async def _with_aborts(engine: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
    return await asyncio.gather(*(_one(engine, i, prompt, sampling) for i, prompt in enumerate(prompts)))


async def _one(engine: Any, number: int, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    tokens: list[int] = []
    name = f"second-{number}"
    answers = await engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=name, stream=True)
    async for answer in answers:
        tokens = answer["output_ids"]
        if number in ABORTED and len(tokens) >= TOKENS_BEFORE_ABORT:
            engine.tokenizer_manager.abort_request(name)
    return tokens


def _at_rest(engine: Any) -> list[dict[str, Any]]:
    """The states once no request holds anything: an aborted one is released by the scheduler's next step."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        states: list[dict[str, Any]] = engine.get_server_info()["internal_states"]
        held = [state["baige_device"]["hisparse"] for state in states]
        if time.monotonic() > deadline or not any(pool and pool["device_tokens"] for pool in held):
            return states
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
