"""Start vLLM on SmolLM2 and answer two prompts in one batch, the first constrained; print one JSON line.

python -m tests.engines.vllm.structured MODEL REGEX
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import Any

from tests.engines.vllm.generate import DEFAULTS, cases


def leave_out(name: str, *attributes: str) -> None:
    """Let vLLM import a grammar backend that the test environment does not install and no request here chooses."""
    module = ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, object)
    sys.modules[name] = module


def main(model: str, regex: str) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch

    torch.set_num_threads(1)
    leave_out("lmformatenforcer", "TokenEnforcer", "TokenEnforcerTokenizerData", "CharacterLevelParser")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(model=model, **{**DEFAULTS, "dtype": "float16", "skip_tokenizer_init": False})
    common: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    asked = [{"prompt_token_ids": case["prompt"]} for case in cases(model)[:2]]
    sampling = [
        SamplingParams(**common, structured_outputs=StructuredOutputsParams(regex=regex)),
        SamplingParams(**common, ignore_eos=True),
    ]
    results = [result.outputs[0] for result in llm.generate(asked, sampling, use_tqdm=False)]
    answer = {
        "texts": [result.text for result in results],
        "tokens": [list(result.token_ids) for result in results],
        "reports": llm.collective_rpc("baige_report"),
    }
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
