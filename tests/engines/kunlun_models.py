"""The tiny DeepSeek models in shapes that Kunlun's kernels take, with greedy tokens that 16-bit rounding leaves alone.

    python -m tests.engines.kunlun_models NAME     # makes the model; run inside an engine environment

Latent rows of 576 columns with values of 512, and float16 weights. The directories are like those of `tiny_models`. A
file of its own, since the cache key of the other models is a hash of theirs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.engines import tiny_models
from tests.engines.cached_models import cached, publish_model
from tests.engines.tiny_models import CONFIGS, EXTENDED_TOKENS, TAIL_TOKENS, Oracle, random_prompts, randomize

__all__ = ["NAMES", "model_path"]

NAMES = ("deepseek_v3", "deepseek_v32")
SHAPE = {"kv_lora_rank": 512, "torch_dtype": "float16"}
PROMPT_TOKENS = {"deepseek_v3": (5, EXTENDED_TOKENS), "deepseek_v32": (5, EXTENDED_TOKENS, 350)}
DISTURBANCE = 1e-3  # relative; float16 rounds by up to 5e-4
DISTURBED_MODELS = 3
KEY_VALUE_SCALE = 0.3
SEEDS = {"deepseek_v3": 1, "deepseek_v32": 5}  # with which few prompts are tried


class HalfOracle(Oracle):
    """Tokens that stay when every weight is disturbed by more than float16 rounds, in several independent ways."""

    def __init__(self, path: Path) -> None:
        import torch

        super().__init__(path)
        self.others = [copy.deepcopy(self.model) for _ in range(DISTURBED_MODELS)]
        with torch.no_grad():
            for model in self.others:
                for weight in model.parameters():
                    weight.mul_(1 + DISTURBANCE * torch.randn_like(weight))

    def confirms(self, model: Any, prompt: list[int], output: list[int]) -> bool:
        own = super().confirms(model, prompt, output)
        if model is not self.model:
            return own
        return own and all(super(HalfOracle, self).confirms(other, prompt, output) for other in self.others)


def model_path(name: str) -> Path:
    """Directory of the model ``name`` (one of ``NAMES``), made if it is not cached, which may take two minutes."""
    return cached(directory(name), "tests.engines.kunlun_models", name)


def directory(name: str) -> str:
    sources = Path(__file__).read_bytes() + Path(tiny_models.__file__).read_bytes()
    return f"test-kunlun-{name}-{hashlib.sha256(sources).hexdigest()[:12]}"


def make(name: str, out: Path) -> None:
    """Write random float16 weights and the expected tokens of random prompts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.dumps({**CONFIGS[name], **SHAPE}, indent=1)
    (out / "config.json").write_text(config)
    generator = torch.Generator().manual_seed(SEEDS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    randomize(model, generator)
    soften(model)
    model.half().save_pretrained(out)
    # transformers rewrites the config in its own terms and drops what it does not know.
    (out / "config.json").write_text(config)

    oracle = HalfOracle(out)
    cases = [oracle.first_sound(random_prompts([], tokens, generator)) for tokens in PROMPT_TOKENS[name]]
    stem = next(case["prompt"] for case in cases if len(case["prompt"]) == EXTENDED_TOKENS)
    cases.append(oracle.first_sound(random_prompts(stem, TAIL_TOKENS, generator)))
    (out / "expected.json").write_text(json.dumps(cases))


def soften(model: Any) -> None:
    """Let no single key decide: rounding swaps keys at the edge of an index top-k, which shall move logits little."""
    import torch

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "kv_b_proj" in name:
                tensor.mul_(KEY_VALUE_SCALE)


if __name__ == "__main__":
    publish_model(directory(sys.argv[1]), lambda out: make(sys.argv[1], out))
