"""Driver: start sglang.Engine on a test model, generate greedily, print one JSON object.

    python -m tests.engines.sglang.generate MODEL '{"engine option": value, ...}'

The prompts of `expected.json` go in two batches: the last one of a random model extends an earlier one and hits the
prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.sglang import host
from tests.engines.tiny_models import OUTPUT_TOKENS, expected_cases

if os.environ.get("BAIGE_BACKEND") != "reference":  # here, because the engine's processes import this module as well
    host.prepare()

DEFAULTS = {
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": 256,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "log_level": "info",
}


def main(model: str, options: dict[str, Any]) -> None:
    from sglang import Engine

    cases = expected_cases(Path(model))
    engine = Engine(model_path=model, **{**DEFAULTS, **options})
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
