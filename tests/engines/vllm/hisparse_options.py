"""Make vLLM's configuration for each case of a JSON list on stdin, and print what became of HiSparse, or the error.

python -m tests.engines.vllm.hisparse_options < '[{"model": PATH, "options": {...}}]'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    for case in json.load(sys.stdin):
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # of the case before: each stands for a process of its own
        print("ANSWER " + json.dumps(outcome(case["model"], case["options"])), flush=True)


def outcome(model: str, options: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    try:
        args = EngineArgs(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=1024, **options)
        config = args.create_engine_config()
    except Exception as error:  # pydantic may wrap ours
        return {"error": str(error)}
    from baige_device.engines.vllm.options import engine_settings

    return {
        "hisparse": engine_settings(config).hisparse.model_dump(),
        "native": config.attention_config.hisparse_config is not None,
        "connector": config.kv_transfer_config is not None,
    }


if __name__ == "__main__":
    main()
