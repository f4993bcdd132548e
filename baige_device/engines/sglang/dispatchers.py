"""SGLang's token dispatchers over our ops: one for experts that hold all tokens, one that sends tokens to experts."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch.distributed as dist
from sglang.srt.layers.moe.token_dispatcher.base import (
    BaseDispatcher,
    CombineInputFormat,
    DispatchOutputFormat,
)
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatcher
from sglang.srt.runtime_context import get_schedule, process_model_config
from torch import Tensor

from baige_device.engines.sglang.moe_scale import first_scale
from baige_device.engines.sglang.needs import MOE_LAYOUT
from baige_device.errors import MountError
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.registry.table import OpTable

__all__ = ["Combine", "Dispatch", "LocalDispatcher", "TokenDispatcher", "capacity_tokens"]


class Dispatch(NamedTuple):
    """What `experts_forward` gets; the first three fields are those of SGLang's standard format."""

    hidden_states: Tensor
    hidden_states_scale: None
    topk_output: Any
    batch: ExpertBatch

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.STANDARD


class Combine(NamedTuple):
    """What `experts_forward` returns."""

    hidden_states: Tensor
    batch: ExpertBatch

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.STANDARD


class LocalDispatcher(StandardDispatcher):
    """Without an all-to-all: every rank holds all tokens, computes its own experts, and SGLang sums over the ranks."""

    def __init__(self, config: Any, ops: OpTable) -> None:
        super().__init__(config)
        self.ops = ops
        self.scale = first_scale(config.routed_scaling_factor)

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Dispatch:
        standard = super().dispatch(hidden_states, topk_output)
        x, topk = standard.hidden_states, standard.topk_output
        batch = self.ops.moe_dispatch(
            x,
            topk.topk_ids,
            scaled(topk.topk_weights, self.scale),
            num_experts=self.num_local_experts,
            layout=MOE_LAYOUT,
            max_tokens_per_rank=x.shape[0],
            group=one_rank_group(),
        )
        return Dispatch(x, None, topk, batch)

    def combine(self, combine_input: Combine) -> Tensor:
        reduced = self.ops.moe_combine(combine_input.hidden_states, combine_input.batch)
        out: Tensor = super().combine(StandardCombineInput(reduced))
        return out


class TokenDispatcher(BaseDispatcher):
    """With an all-to-all: every rank holds its own tokens and sends each to the ranks of its experts."""

    def __init__(self, config: Any, ops: OpTable, group: Any) -> None:
        super().__init__()
        self.scale = first_scale(config.routed_scaling_factor)
        if config.num_fused_shared_experts:
            raise MountError(
                f"sglang: MoE layer {config.layer_id}: fused shared experts: expected 0 with an all-to-all, got "
                f"{config.num_fused_shared_experts}; add --disable-shared-experts-fusion"
            )
        self.ops = ops
        self.num_experts = config.num_experts
        self.group = group.device_group
        self.max_tokens = capacity_tokens()

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Dispatch:
        batch = self.ops.moe_dispatch(
            hidden_states,
            topk_output.topk_ids,
            scaled(topk_output.topk_weights, self.scale),
            num_experts=self.num_experts,
            layout=MOE_LAYOUT,
            max_tokens_per_rank=self.max_tokens,
            group=self.group,
        )
        return Dispatch(hidden_states, None, topk_output, batch)

    def combine(self, combine_input: Combine) -> Tensor:
        out: Tensor = self.ops.moe_combine(combine_input.hidden_states, combine_input.batch)
        return out


def scaled(topk_weights: Tensor, scale: float | None) -> Tensor:
    """The router weights times what SGLang's runner would multiply the sum by; in fp32, before anything is rounded.

    Raises:
        MountError: the layer was not part of the model when it was loaded, so its block is not known.
    """
    if scale is None:
        raise MountError("sglang: MoE layer: routed_scaling_factor: expected a layer of the loaded model, got another")
    return topk_weights if scale == 1.0 else topk_weights * scale


def capacity_tokens() -> int:
    """The most tokens a rank can bring to one step, from limits that are equal on all ranks.

    Without chunked prefill a single request may exceed `max_prefill_tokens`, up to the context length.
    """
    schedule = get_schedule()
    limits = (schedule.max_prefill_tokens, schedule.chunked_prefill_size, schedule.max_running_requests)
    return max(int(process_model_config().context_len), *(int(limit or 0) for limit in limits))


@functools.lru_cache(maxsize=1)
def one_rank_group() -> Any:
    """A group of this rank alone; None, which means the same, in a world of one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
