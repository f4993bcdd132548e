"""Driver: start sglang.Engine on a test model, generate greedily, print one JSON object.

    python -m tests.engines.sglang.generate MODEL '{"engine option": value, ...}'

The prompts of `expected.json` go in two batches: the last one of a random model extends an earlier one and hits the
prefix cache.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.sglang import host
from tests.engines.tiny_models import OUTPUT_TOKENS, expected_cases

if os.environ.get("BAIGE_BACKEND") != "reference":  # here, because the engine's processes import this module as well
    host.prepare()
gc.set_threshold(50_000)  # a sixth of what importing SGLang takes, in each of its processes, is the collector's

DEFAULTS = {
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": 256,
    "skip_server_warmup": True,
    "log_level": "info",
}


def start(model: str, options: dict[str, Any]) -> Any:
    """An engine without its detokenizer, to which no token goes here; it would be one more process that imports SGLang.

    The drivers with a tokenizer and the server start all of it.
    """
    from sglang.srt.entrypoints.engine import Engine

    class TokensOnly(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_detokenizer_subprocesses(cls, *arguments: object, **named: object) -> tuple[list[Any], list[str]]:
            return [], []

    return TokensOnly(model_path=model, **{**DEFAULTS, **options, "skip_tokenizer_init": True})


def main(model: str, options: dict[str, Any]) -> None:
    cases = expected_cases(Path(model))
    engine = start(model, options)
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    answers = []
    for batch in (cases[:-1], cases[-1:]):
        answers += engine.generate(input_ids=[case["prompt"] for case in batch], sampling_params=sampling)
    states = engine.get_server_info()["internal_states"]
    report = {
        "tokens": [answer["output_ids"] for answer in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
        "reports": [state.get("baige_device") for state in states],
        "attention_backend": states[0]["attention_backend"],
    }
    engine.shutdown()
    print("ANSWER " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
