"""Small models with the greedy tokens that transformers generates from them: the exact oracle of the engine tests.

    python -m tests.engines.tiny_models NAME        # makes the model; run inside an engine environment

Each directory is a checkpoint that vLLM and SGLang both load, with ``expected.json``: a list of
``{"prompt": ids, "output": ids}`` (for smollm2 also ``"text"``), 16 output tokens each, generated without stopping at
the end-of-sequence token (``ignore_eos``). The cache key is a hash of this file, so editing it makes every model anew.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from baige_device.cli.demo_model import default_cache_dir, prepare_smollm2
from tests.engines.cached_models import cached, publish_model

OUTPUT_TOKENS = 16
MIN_LOGIT_MARGIN = 2e-3  # between best and second: rounding in an engine moves float32 logits by about 1e-5
DISTURBANCE = 1e-5  # relative
MAX_TRIALS = 200

COMMON: dict[str, Any] = {
    "vocab_size": 12000,  # SGLang's dynamic chunking profiles with token ids up to 9999
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,  # pipeline stages of SGLang cannot tie them
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
DEEPSEEK = {
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 256,  # with the rope part 320: vLLM's MLA metadata knows 320, 512 and 576 only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",  # not a field of transformers' config, yet both engines ask for it
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    # On device "cpu" SGLang's MLA accepts yarn only. Prompts longer than the original length exercise it.
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **DEEPSEEK},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **DEEPSEEK,
        # An index score sums gate * ReLU(q . k) over the index heads. With few heads many scores are exactly zero, and
        # which of equal scores a top-k takes is undefined.
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 128,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **COMMON,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
    },
}
PROMPT_TOKENS = {
    "deepseek_v3": (5, 60, 200, 700),
    "deepseek_v32": (5, 64, 200, 350, 700),
    "qwen3_moe": (5, 60, 200, 700),
}
EXTENDED_TOKENS = 200  # the prompt of this length comes once more with a tail, to hit a prefix cache
TAIL_TOKENS = 9

SHORT_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "<|im_start|>user\nName the largest planet.<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, the first human being to walk on the Moon was",
)
WINDS = ("north", "east", "south", "west")
DIARY = " ".join(
    f"On day {day} the keeper of the lighthouse wrote that the wind came from the {WINDS[day % 4]}, "
    f"that {3 + 7 * day % 11} ships passed, and that the lamp burned all night."
    for day in range(1, 26)
)
LONG_TEXTS = tuple(
    f"{DIARY} {tail}" for tail in ("On day 26 the keeper", "The keeper of the lighthouse", "In the month")
)
NAMES = (*CONFIGS, "smollm2")


def model_path(name: str) -> Path:
    """Directory of the model ``name`` (one of ``NAMES``), made if it is not cached, which may take two minutes."""
    return cached(directory(name), "tests.engines.tiny_models", name)


def directory(name: str) -> str:
    return f"test-{name}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"


def expected_cases(path: Path) -> list[dict[str, Any]]:
    """The cases of ``expected.json`` in the directory of a model."""
    cases: list[dict[str, Any]] = json.loads((path / "expected.json").read_text())
    return cases


def make_random(name: str, out: Path) -> None:
    """Write random weights for ``CONFIGS[name]`` and the expected tokens of random prompts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.dumps(CONFIGS[name], indent=1)
    (out / "config.json").write_text(config)
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    randomize(model, generator)
    model.save_pretrained(out)
    # transformers rewrites the config in its own terms and drops what it does not know.
    (out / "config.json").write_text(config)

    oracle = Oracle(out)
    cases = [oracle.first_sound(random_prompts([], tokens, generator)) for tokens in PROMPT_TOKENS[name]]
    stem = next(case["prompt"] for case in cases if len(case["prompt"]) == EXTENDED_TOKENS)
    cases.append(oracle.first_sound(random_prompts(stem, TAIL_TOKENS, generator)))
    (out / "expected.json").write_text(json.dumps(cases))


def randomize(model: Any, generator: Any) -> None:
    """Weights with a spread that makes attention and routing matter, so that an error in either changes the tokens."""
    import torch

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name:
                tensor.normal_(0, 0.05, generator=generator)
            elif tensor.dim() > 1:
                tensor.normal_(0, 1.0 if "embed" in name else 0.15, generator=generator)
                if "weights_proj" in name:  # SGLang rounds it to bfloat16, transformers does not: make both the same
                    tensor.copy_(tensor.bfloat16().float())


def random_prompts(stem: list[int], tokens: int, generator: Any) -> Iterator[dict[str, Any]]:
    import torch

    for _ in range(MAX_TRIALS):
        yield {"prompt": stem + torch.randint(3, COMMON["vocab_size"], (tokens,), generator=generator).tolist()}


def make_smollm2(out: Path) -> None:
    """The demo's checkpoint (hard links, no copy) with the expected tokens of five texts, one of 700 tokens or more."""
    from transformers import AutoTokenizer

    for file in prepare_smollm2(default_cache_dir()).iterdir():
        os.link(file, out / file.name)
    tokenizer = AutoTokenizer.from_pretrained(out)
    oracle = Oracle(out)

    def prompts(texts: Iterable[str], min_tokens: int) -> Iterator[dict[str, Any]]:
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            if len(ids) >= min_tokens:
                yield {"prompt": ids, "text": text}

    short = prompts(SHORT_TEXTS, 1)
    cases = [oracle.first_sound(short) for _ in range(4)]
    cases.append(oracle.first_sound(prompts(LONG_TEXTS, 700)))
    (out / "expected.json").write_text(json.dumps(cases, indent=1))


class Oracle:
    """Greedy tokens by transformers, only for prompts on which they do not hang on rounding.

    Expert choice and sparse top-k jump at near-ties, and random models are full of those: transformers then disagrees
    with itself, and such a prompt proves nothing about an engine. Sound means: the same tokens with a KV cache, without
    one, in float64 and with all weights slightly disturbed, and a clear best logit at each step.
    """

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(2)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        # The grouped kernels of MoE layers know no float64.
        self.exact = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        self.disturbed = copy.deepcopy(self.model)
        with torch.no_grad():
            for weight in self.disturbed.parameters():
                weight.mul_(1 + DISTURBANCE * torch.randn_like(weight))

    def first_sound(self, prompts: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """The first sound prompt with its ``output``; raises RuntimeError when there is none."""
        for trial, case in enumerate(prompts, 1):
            output = self.greedy(case["prompt"])
            if all(self.confirms(m, case["prompt"], output) for m in (self.model, self.exact, self.disturbed)):
                print(f"prompt of {len(case['prompt'])} tokens: sound at trial {trial}", file=sys.stderr, flush=True)
                return {**case, "output": output}
        raise RuntimeError("tiny model: no prompt was found whose greedy tokens do not hang on rounding")

    def greedy(self, prompt: list[int]) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def confirms(self, model: Any, prompt: list[int], output: list[int]) -> bool:
        """Whether one pass of ``model`` without a KV cache picks ``output`` too, by a clear margin at every step."""
        import torch

        with torch.no_grad():
            logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        clear = (best.values[:, 0] - best.values[:, 1] > MIN_LOGIT_MARGIN).all()
        return len(output) == OUTPUT_TOKENS and bool(clear) and best.indices[:, 0].tolist() == output


def main(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"tiny model: name: expected one of {', '.join(NAMES)}, got {name!r}")
    publish_model(directory(name), make_smollm2 if name == "smollm2" else lambda out: make_random(name, out))


if __name__ == "__main__":
    main(*sys.argv[1:])
