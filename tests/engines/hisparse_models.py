"""A tiny DeepSeek-V3.2 whose contexts are many times its top-k, with the greedy tokens that transformers generates.

    python -m tests.engines.hisparse_models     # makes the model; run inside an engine environment

A file of its own, since the cache key of the other models is a hash of theirs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.engines import tiny_models
from tests.engines.cached_models import cached, publish_model
from tests.engines.tiny_models import CONFIGS, Oracle, random_prompts, randomize

__all__ = ["TOPK", "model_path"]

TOPK = 64
PROMPT_TOKENS = (5, 60, 130, 200, 390, 450, 500, 640)


def model_path() -> Path:
    """Directory of the model, made if it is not cached, which may take two minutes."""
    return cached(directory(), "tests.engines.hisparse_models")


def directory() -> str:
    sources = Path(__file__).read_bytes() + Path(tiny_models.__file__).read_bytes()
    return f"test-hisparse-{hashlib.sha256(sources).hexdigest()[:12]}"


def make(out: Path) -> None:
    """Write random weights and the expected tokens of random prompts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, Any] = {**CONFIGS["deepseek_v32"], "index_topk": TOPK}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    randomize(model, generator)
    model.save_pretrained(out)
    # transformers rewrites the config in its own terms and drops what it does not know.
    (out / "config.json").write_text(json.dumps(config, indent=1))
    oracle = Oracle(out)
    cases = [oracle.first_sound(random_prompts([], tokens, generator)) for tokens in PROMPT_TOKENS]
    (out / "expected.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    publish_model(directory(), make)
