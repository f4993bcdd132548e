"""Driver: start sglang.Engine on SmolLM2, answer two prompts in one batch, the first constrained; print one JSON line.

python -m tests.engines.sglang.structured MODEL REGEX
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xgrammar

from tests.engines.sglang.generate import DEFAULTS  # which prepares this host, also in the engine's processes
from tests.engines.tiny_models import expected_cases


def refuse(*arguments: object, **options: object) -> None:
    raise RuntimeError("the chip runs no kernel of xgrammar")


xgrammar.apply_token_bitmask_inplace = refuse  # host tensors have one, which must not help out


def main(model: str, regex: str) -> None:
    from sglang import Engine

    engine = Engine(model_path=model, **{**DEFAULTS, "dtype": "float16"})
    common: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8}
    answers = engine.generate(
        input_ids=[case["prompt"] for case in expected_cases(Path(model))[:2]],
        sampling_params=[{**common, "regex": regex}, {**common, "ignore_eos": True}],
    )
    states = engine.get_server_info()["internal_states"]
    report = {
        "texts": [answer["text"] for answer in answers],
        "tokens": [answer["output_ids"] for answer in answers],
        "reports": [state["baige_device"] for state in states],
    }
    engine.shutdown()
    print("ANSWER " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
