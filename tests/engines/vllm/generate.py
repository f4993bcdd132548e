"""Start vLLM on a model, generate for the cases of its expected.json, and print one JSON line.

    python -m tests.engines.vllm.generate MODEL [--options JSON] [--cases N] [--break MODULE:NAME] [--metrics PORT]

`--options` are keyword arguments of `vllm.LLM`. `--cases` takes the first N only. `--break` deletes a name of the host
before the engine starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,  # longer prompts are prefilled in chunks
    "kv_cache_memory_bytes": 1 << 28,
    "skip_tokenizer_init": True,
}


def main() -> None:
    arguments = parse()
    options = DEFAULTS | arguments.options
    several = options.get("tensor_parallel_size", 1) > 1
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if several else "0")
    import torch

    torch.set_num_threads(1)
    if arguments.breaks:
        break_host(arguments.breaks)
    from vllm import LLM

    llm = LLM(model=arguments.model, **options)
    tokens = generate(llm, cases(arguments.model)[: arguments.cases])
    answer = {"tokens": tokens, "reports": llm.collective_rpc("baige_report"), "vendor_calls": vendor_calls()}
    if arguments.metrics:
        with urllib.request.urlopen(f"http://127.0.0.1:{arguments.metrics}/metrics", timeout=10) as page:
            answer["metrics"] = page.read().decode()
    print("ANSWER " + json.dumps(answer), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--cases", type=int, default=None)
    parser.add_argument("--break", dest="breaks", default="")
    parser.add_argument("--metrics", type=int, default=0)
    return parser.parse_args()


def cases(model: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(model) / "expected.json").read_text())
    return found


def generate(llm: Any, prompts: list[dict[str, Any]], tokens: int = 16) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    asked = [{"prompt_token_ids": case["prompt"]} for case in prompts]
    return [list(result.outputs[0].token_ids) for result in llm.generate(asked, sampling, use_tqdm=False)]


def vendor_calls() -> dict[str, int]:
    """Calls of each vendor op, when this process found the Kunlun emulator."""
    emulator = sys.modules.get("kunlun_emulator.state")
    return dict(emulator.STATE.calls) if emulator is not None else {}


def break_host(target: str) -> None:
    module, _, name = target.partition(":")
    delattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
