"""HiSparse's plan in SGLang's log: the planner's arithmetic over the pools that SGLang made."""

from __future__ import annotations

from typing import Any

from baige_device.activation import current
from baige_device.engines.sglang.hisparse_args import ranks_per_node
from baige_device.optimizations.hisparse.plan import HiSparseFacts, plan_hisparse
from baige_device.optimizations.hisparse.setup import announce

__all__ = ["announce_plan"]

_GIB = 1 << 30


def announce_plan(runner: Any) -> None:
    """Log what the pools of a runner's coordinator hold, for requests of the longest context."""
    coordinator, context_tokens = runner.hisparse_coordinator, runner.model_config.context_len
    device, host_tokens = coordinator.mem_pool_device, coordinator.mem_pool_host.size
    logical_tokens = coordinator.token_to_kv_pool_allocator.logical_attn_allocator.size
    index_bytes = sum(keys.nbytes for keys in device.index_key_cache.buffer)
    token_bytes, ranks = device.layer_num * coordinator.item_size_bytes, ranks_per_node(runner.server_args)
    gather = current().resolutions["uva_sparse_gather"].chosen
    assert gather is not None  # one of the needs that were resolved
    facts = HiSparseFacts(
        num_layers=device.layer_num,
        row_bytes=coordinator.item_size_bytes,
        index_row_bytes=index_bytes // (logical_tokens * device.layer_num),
        topk=coordinator.top_k,
        context_tokens=context_tokens,
        device_kv_bytes=device.size * token_bytes + index_bytes,
        host_gib_per_node=host_tokens * token_bytes * ranks / _GIB,
        local_ranks=ranks,
        link_bytes_per_s=gather.offer.facts.get("link_bytes_per_s", HiSparseFacts.link_bytes_per_s),
    )
    room = device.size // coordinator.padded_buffer_size
    text = (
        f"as SGLang divides the device: {device.size} latent rows / {coordinator.padded_buffer_size} of a hot buffer "
        f"and its page = {room} requests; index keys of {logical_tokens} tokens"
    )
    announce(plan_hisparse(facts, coordinator.device_buffer_size), context_tokens, text)
