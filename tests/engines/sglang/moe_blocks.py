"""Driver: the MoE blocks of SGLang's models through our ops, each against a float64 sum; prints one JSON object.

    python -m tests.engines.sglang.moe_blocks MODEL

MODEL is any checkpoint that SGLang's arguments can be made from. For every block of `BLOCKS` the answer holds the worst
error where SGLang sees no CUDA and where it believes to.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from baige_device.engines.sglang.moe_scale import BLOCKS
from baige_device.errors import MountError

FACTOR = 2.5
TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 7, 8, 64, 32
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    intermediate_size=2 * INTERMEDIATE,
    moe_intermediate_size=INTERMEDIATE,
    hidden_act="silu",
    num_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    n_shared_experts=1,
    num_shared_experts=1,
    num_hidden_layers=2,
    n_group=2,
    num_expert_group=2,
    topk_group=1,
    norm_topk_prob=True,
    moe_renormalize=True,
    moe_router_enable_expert_bias=True,
    score_function="sigmoid",
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    routed_scaling_factor=FACTOR,
    activation_situ_beta=None,
    activation_situ_linear_beta=None,
    model_type="test",
    use_bias=False,
    architectures=["DeepseekV3ForCausalLM"],
    torch_dtype=torch.float32,
)


def main(model: str) -> None:
    start(model)
    blocks = {path: build(path) for path in BLOCKS}  # before any of them is told that there is CUDA
    report: dict[str, Any] = {path: [error_of(block, cuda) for cuda in (False, True)] for path, block in blocks.items()}
    report["refused"] = refusals(blocks["bailing_moe.BailingMoESparseMoeBlock"])
    print("ANSWER " + json.dumps(report), flush=True)


def start(model: str) -> None:
    """What a worker does before it builds a model: plugins, arguments, process groups, activation."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from baige_device.activation import activate
    from baige_device.settings import load_settings

    load_plugins()
    publish(ServerArgs(model_path=model, skip_tokenizer_init=True), role="test", ranks=SpawnRanks(world_rank=0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    activate(load_settings())


def build(path: str) -> torch.nn.Module:
    module, _, name = path.rpartition(".")
    block = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    known = {"config": CONFIG, "layer_id": 1, "layer_idx": 1, "quant_config": None, "prefix": "mlp"}
    wanted = inspect.signature(block).parameters
    built: torch.nn.Module = block(**{key: value for key, value in known.items() if key in wanted})
    with torch.no_grad():
        for weight in built.parameters():
            weight.normal_(0, 0.3)
    return built


def error_of(block: Any, cuda: bool) -> float:
    """The worst error of the block's output, relative to the largest wanted number."""
    import sglang.srt.utils

    from baige_device.engines.sglang.moe_scale import bind_scales

    module = sys.modules[type(block).__module__]
    if hasattr(module, "_is_cuda"):
        module._is_cuda = cuda  # type: ignore[attr-defined]
    sglang.srt.utils.is_cuda = lambda: cuda
    block.experts.dispatcher.scale = None
    bind_scales(torch.nn.ModuleDict({"mlp": block}))
    x = torch.randn(TOKENS, HIDDEN)
    with torch.inference_mode():
        got = block(x)
        logits = block.gate(x)
        topk = block.topk(x, logits[0] if isinstance(logits, tuple) else logits)
        want = block.shared_experts(x).double() + FACTOR * routed(block.experts, x.double(), topk)
    return float((got - want).abs().max() / want.abs().max())


def refusals(block: Any) -> list[str]:
    """What a layer says that was never part of a loaded model, and one whose block nobody knows."""
    from baige_device.engines.sglang.moe_scale import bind_scales

    class Unknown(type(block)):  # type: ignore[misc]
        pass

    found = []
    block.__class__, block.experts.dispatcher.scale = Unknown, None
    for act in (lambda: block(torch.randn(TOKENS, HIDDEN)), lambda: bind_scales(torch.nn.ModuleDict({"mlp": block}))):
        try:
            act()
        except MountError as error:
            found.append(str(error))
    return found


def routed(experts: Any, x: torch.Tensor, topk: Any) -> torch.Tensor:
    out = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(topk.topk_ids.tolist(), topk.topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (experts.w13_weight[expert].double() @ x[token]).chunk(2)
            out[token] += weight * (experts.w2_weight[expert].double() @ (silu(gate) * up))
    return out


if __name__ == "__main__":
    main(sys.argv[1])
