"""MoE: experts, dispatch and combine through our ops, inside vLLM's modular kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from baige_device.engines.vllm.needs import MOE_LAYOUT
from baige_device.engines.vllm.process import op_table
from baige_device.errors import MountError
from baige_device.ops.moe_dispatch.contract import ExpertBatch

__all__ = ["Experts", "MoeMethod", "PrepareFinalize"]

ACTIVATIONS = {MoEActivation.SILU: "silu", MoEActivation.GELU_TANH: "gelu"}


class PrepareFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """`prepare` is `moe_dispatch`, `finalize` is `moe_combine`; what lies between belongs to one layer and step."""

    def __init__(self, ops: Any, group: Any, max_tokens_per_rank: int, local_experts: int, exchanges: bool) -> None:
        """`group` are the ranks that exchange tokens; `exchanges` when each holds tokens of its own (DP with EP)."""
        self.ops = ops
        self.group = group
        self.max_tokens = max_tokens_per_rank
        self.local_experts = local_experts
        self.exchanges = exchanges
        self.batch: ExpertBatch | None = None

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return dist.get_world_size(self.group)

    def output_is_reduced(self) -> bool:
        return self.exchanges

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, None, Any, Tensor, Tensor]:
        """Send the tokens `[T, H]` to their experts' ranks."""
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
            topk_weights = torch.ones_like(topk_weights)
        if expert_map is not None and not self.exchanges:
            topk_ids, num_experts = _local_ids(topk_ids, expert_map), self.local_experts
        batch: ExpertBatch = self.ops.moe_dispatch(
            a1,
            topk_ids,
            topk_weights.float(),
            num_experts=num_experts,
            layout=MOE_LAYOUT,
            max_tokens_per_rank=self.max_tokens,
            group=self.group,
        )
        assert batch.topk_ids is not None
        assert batch.topk_weights is not None
        self.batch = batch
        counts = mk.ExpertTokensMetadata(expert_num_tokens=batch.expert_counts, expert_num_tokens_cpu=None)
        return batch.x, None, counts, batch.topk_ids, batch.topk_weights

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Bring the weighted rows back and sum them into `output` `[T, H]`."""
        batch, self.batch = self.batch, None
        assert batch is not None
        self.ops.moe_combine(fused_expert_output, batch, out=output)


def _local_ids(topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Global expert ids -> this rank's, -1 for those of other ranks; the -1 of a padded token stays."""
    return expert_map[topk_ids.clamp_min(0).long()].masked_fill(topk_ids < 0, -1)


class Experts(mk.FusedMoEExpertsModular):
    """The local experts' feed-forward through `moe_expert_ffn`."""

    def __init__(self, moe_config: Any, quant_config: Any, exchange: PrepareFinalize) -> None:
        super().__init__(moe_config, quant_config)
        self.exchange = exchange

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.use_ep or moe_parallel_config.dp_size == 1

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> tuple[Any, Any, Any]:
        """No scratch: the op owns it. The output has the rows of the dispatched batch."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *, activation: Any, **unused: Any
    ) -> None:
        batch = self.exchange.batch
        assert batch is not None
        output.copy_(self.exchange.ops.moe_expert_ffn(batch, w1, w2, activation=ACTIVATIONS[activation]))


@UnquantizedFusedMoEMethod.register_oot
class MoeMethod(UnquantizedFusedMoEMethod):
    """The unquantised MoE method: the host builds no kernel on an out-of-tree platform, so ours is built here."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if self.supports_internal_mk:  # the kernel outlives a weight update
            return
        parallel = self.moe.moe_parallel_config
        _refuse_unserved(self.moe, layer)
        exchanges = parallel.use_ep and (parallel.dp_size > 1 or parallel.is_sequence_parallel)
        group = get_ep_group().device_group if exchanges else own_group()
        ops = op_table()
        exchange = PrepareFinalize(ops, group, self.moe.max_num_tokens, layer.w13_weight.shape[0], exchanges)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = mk.FusedMoEKernel(exchange, Experts(self.moe, self.moe_quant_config, exchange))


@functools.lru_cache(maxsize=1)
def own_group() -> Any:
    """A group of this rank alone: tokens that tensor-parallel ranks hold in common are not exchanged."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _refuse_unserved(moe: Any, layer: Any) -> None:
    """Refuse what would otherwise be computed wrongly."""
    parallel = moe.moe_parallel_config
    if moe.has_bias or not moe.is_act_and_mul or moe.activation not in ACTIVATIONS:
        known = " or ".join(activation.value for activation in ACTIVATIONS)
        raise MountError(
            f"vllm: MoE: expected gated experts without bias and activation {known}, "
            f"got activation={moe.activation.value}, bias={moe.has_bias}, gated={moe.is_act_and_mul}"
        )
    if parallel.dp_size > 1 and not parallel.use_ep:
        raise MountError("vllm: MoE with data parallelism needs --enable-expert-parallel on this platform")
    if parallel.enable_eplb:
        raise MountError("vllm: MoE: expert load balancing (--enable-eplb) moves experts; our dispatch does not")
    if parallel.use_ep and parallel.ep_size > 1:
        _refuse_uneven(layer.expert_map, parallel.ep_size, parallel.ep_rank)


def _refuse_uneven(expert_map: Tensor, ranks: int, rank: int) -> None:
    """Our dispatch gives rank r the experts `[r·E/N, (r+1)·E/N)`; the host's map must say the same."""
    experts = expert_map.shape[0]
    local = experts // ranks
    linear = torch.full_like(expert_map, -1)
    linear[rank * local : (rank + 1) * local] = torch.arange(local, dtype=expert_map.dtype, device=expert_map.device)
    if experts % ranks or not torch.equal(linear, expert_map):
        raise MountError(
            f"vllm: MoE: expected {experts} experts in equal consecutive parts on {ranks} ranks "
            "(--expert-placement-strategy linear)"
        )
