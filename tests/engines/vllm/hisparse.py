"""Drive one vLLM through the life of HiSparse, and print what happened as one JSON line.

    python -m tests.engines.vllm.hisparse MODEL SCENARIO... [--options JSON]

Scenarios run in the order given, on one engine in this process, so that its scheduler and pools can be looked at.
Without `hisparse` among the options they give the tokens of an ordinary vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG_TOKENS = 1536
"""Six times a hot buffer of twice the top-k of 128."""
OUTPUT_TOKENS = 10
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1584,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 26,
    "skip_tokenizer_init": True,
}


class Engine:
    """vLLM's engine, its scheduler and its workers' reports."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.free_blocks = self.count_free_blocks()

    def count_free_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def generate(self, prompts: list[list[int]], tokens: int = OUTPUT_TOKENS) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(asked, sampling(tokens), use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def steps(self, count: int) -> dict[str, list[int]]:
        """Run some steps; the tokens of every request that finished in them."""
        finished = {}
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
        return finished

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = self.llm.collective_rpc("baige_report")[0]["hisparse"]
        return found

    def settled(self) -> dict[str, Any]:
        """Pools after the last finished request was told to the worker."""
        self.steps(1)
        report = self.report()
        held = {"held_blocks": self.free_blocks - self.count_free_blocks()}
        return held | ({"held_hot_rows": report["hot_rows"] - report["free_hot_rows"]} if report else {})


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)


def draw_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 12000) for _ in range(tokens)]


def known(engine: Engine, model: str) -> dict[str, Any]:
    """The cases whose tokens transformers knows, in one batch: prompt chunks beside decodes."""
    cases = json.loads((Path(model) / "expected.json").read_text())
    return {"tokens": engine.generate([case["prompt"] for case in cases], 16)}


def long(engine: Engine, model: str) -> dict[str, Any]:
    """A context of six hot buffers, and the same once more with a tail, from the prefix cache."""
    stem = draw_prompt(1, LONG_TOKENS)
    tokens = engine.generate([stem])
    before = prefix_cache(engine)
    tokens += engine.generate([stem + draw_prompt(2, 20)])
    cached = [now - then for now, then in zip(prefix_cache(engine), before, strict=True)]
    return {"tokens": tokens, "prompt_tokens": len(stem), "cached": cached}


def prefix_cache(engine: Engine) -> tuple[int, int]:
    """Tokens asked of the prefix cache, and found."""
    counters = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    return int(counters["vllm:prefix_cache_queries"]), int(counters["vllm:prefix_cache_hits"])


def many(engine: Engine, model: str) -> dict[str, Any]:
    """Eight at once, of different lengths."""
    prompts = [draw_prompt(10 + index, 100 + 9 * index) for index in range(8)]
    return {"tokens": engine.generate(prompts, 2 * OUTPUT_TOKENS)}


def overlapped(engine: Engine, model: str) -> dict[str, Any]:
    """The same eight, hits and misses attended apart."""
    from baige_device.engines.vllm import hisparse

    coordinator = hisparse.active()
    assert coordinator is not None
    assert coordinator.hot is not None
    coordinator.hot.overlap = True
    found = many(engine, model)
    coordinator.hot.overlap = False
    return found


def preempt(engine: Engine, model: str) -> dict[str, Any]:
    """More than the blocks hold: requests are preempted in mid-decode, and resumed."""
    prompts = [draw_prompt(20 + index, 516) for index in range(3)]
    return {"tokens": engine.generate(prompts, 24)}


def abort(engine: Engine, model: str) -> dict[str, Any]:
    """One of three is aborted in mid-decode, one in mid-prompt; the third goes on undisturbed."""
    prompts = [draw_prompt(30, 150), draw_prompt(31, 200), draw_prompt(32, 900)]
    for name, prompt in zip(("kept", "decoding", "prompt"), prompts, strict=True):
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling(OUTPUT_TOKENS))
    engine.steps(4)
    held = engine.report()
    engine.llm.llm_engine.abort_request(["decoding", "prompt"])
    finished = engine.steps(OUTPUT_TOKENS + 4)
    alone = engine.generate(prompts[:1])
    return {"tokens": [*finished.values()], "alone": alone, "names": [*finished], "held": held}


def metrics(engine: Engine, model: str) -> dict[str, Any]:
    """What Prometheus would read of this worker."""
    address = f"http://127.0.0.1:{os.environ['BAIGE_METRICS_PORT']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as page:
        lines = [line.split() for line in page.read().decode().splitlines() if line.startswith("baige_hisparse_")]
    return {"values": {name: float(value) for name, value in lines}}


SCENARIOS: dict[str, Callable[[Engine, str], dict[str, Any]]] = {
    function.__name__: function for function in (known, long, many, overlapped, preempt, abort, metrics)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch

    torch.set_num_threads(1)
    engine = Engine({**DEFAULTS, "model": arguments.model, "disable_log_stats": False, **arguments.options})
    answer = {}
    for name in arguments.scenarios:
        answer[name] = SCENARIOS[name](engine, arguments.model) | {"report": engine.report()}
        engine.llm.reset_prefix_cache()
        answer[name]["settled"] = engine.settled()
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
