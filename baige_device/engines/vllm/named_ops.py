"""Torch bodies of the ops that vLLM calls by name from its compiled libraries, which this platform does not load.

They are address arithmetic and the router's top-k, no part of our op families. The schemas are the host's interface.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baige_device.engines.vllm.compat import has_kernel_registry, router_ops_take_padding

__all__ = ["compute_slot_mapping", "define_named_ops", "define_op"]

_libraries: list[torch.library.Library] = []


def define_named_ops() -> None:
    """Define every op of this file that no compiled library has defined. Idempotent."""
    padding = ", Tensor? is_padding" if router_ops_take_padding() else ""
    routed = (
        "Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
        "bool renormalize, Tensor? bias"
    )
    define_op("_moe_C", f"topk_softmax({routed}{padding}) -> ()", _topk_softmax)
    define_op("_moe_C", f"topk_sigmoid({routed}, float routed_scaling_factor{padding}) -> ()", _topk_sigmoid)
    if not has_kernel_registry():
        schema = "Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor! slot_mapping, int block_size"
        define_op("_C", f"compute_slot_mapping_kernel_impl({schema}) -> ()", compute_slot_mapping)


def compute_slot_mapping(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    """Slot of each token of a ragged batch: its page from the block table, times the page size, plus the offset."""
    tokens = int(query_start_loc[-1])
    lengths = query_start_loc.diff().long()
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    requests = torch.repeat_interleave(rows, lengths, output_size=tokens)
    where = positions[:tokens].long()
    pages = block_table[requests, where // block_size].long()
    slot_mapping[:tokens] = pages * block_size + where % block_size


def define_op(namespace: str, schema: str, body: Callable[..., None]) -> None:
    """Define one op of the host's, unless a compiled library or an earlier call has."""
    name = schema.partition("(")[0]
    if hasattr(getattr(torch.ops, namespace), name):
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    library.impl(name, body, "CompositeExplicitAutograd")
    _libraries.append(library)  # a library that is collected takes its ops along


def _topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    is_padding: Tensor | None = None,
) -> None:
    scores = gating_output.float().softmax(-1)
    _select(scores, bias, renormalize, 1.0, topk_weights, topk_indices, is_padding)


def _topk_sigmoid(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    routed_scaling_factor: float,
    is_padding: Tensor | None = None,
) -> None:
    scores = gating_output.float().sigmoid()
    _select(scores, bias, renormalize, routed_scaling_factor, topk_weights, topk_indices, is_padding)


def _select(
    scores: Tensor,
    bias: Tensor | None,
    renormalize: bool,
    factor: float,
    topk_weights: Tensor,
    topk_indices: Tensor,
    is_padding: Tensor | None,
) -> None:
    """The bias steers the choice and does not enter the weights. A padded token gets no expert."""
    chosen = (scores if bias is None else scores + bias).topk(topk_weights.shape[1], dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    weights = weights * factor
    if is_padding is not None:
        chosen = chosen.masked_fill(is_padding.unsqueeze(1), -1)
        weights = weights.masked_fill(is_padding.unsqueeze(1), 0.0)
    topk_weights.copy_(weights)
    topk_indices.copy_(chosen)
