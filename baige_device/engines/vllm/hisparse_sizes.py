"""How many blocks vLLM's block manager gets when latent rows live on the host and index keys on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baige_device.engines.vllm.hisparse_options import hot_tokens
from baige_device.errors import HostMemoryError
from baige_device.optimizations.hisparse import HiSparseConfig, HiSparseFacts, HiSparsePlan, plan_hisparse
from baige_device.optimizations.hisparse.footprint import footprint
from baige_device.settings import HiSparseSettings

__all__ = ["HostSizes", "local_ranks"]

_GIB = 1 << 30
_STAGED_TOKENS = 1 << 18
"""Context that prompt chunks stage at once; a longer one is served in pieces, each staging its own top-k again."""


def local_ranks(parallel_config: Any) -> int:
    """Worker processes of this server on this node, over which the host pool is split."""
    return int(parallel_config.local_world_size) * max(1, int(parallel_config.data_parallel_size_local))


@dataclass(frozen=True)
class HostSizes:
    """The facts of one rank. A block holds `block_tokens` tokens of every layer."""

    layer_groups: tuple[int, ...]
    row_bytes: int
    index_block_bytes: int
    """Device bytes of one block: the index keys of all layers that have an indexer."""
    block_tokens: int
    topk: int
    hot_tokens: int
    max_requests: int
    max_context_tokens: int
    batched_tokens: int
    host_bytes: int

    @classmethod
    def of(
        cls, vllm_config: Any, host_bytes: int, groups: Sequence[int], row_bytes: int, index_block_bytes: int
    ) -> HostSizes:
        """From vLLM's configuration and the model's layers."""
        topk, hot = int(vllm_config.model_config.hf_text_config.index_topk), hot_tokens(vllm_config)
        scheduler = vllm_config.scheduler_config
        return cls(
            tuple(groups), row_bytes, index_block_bytes, int(vllm_config.cache_config.block_size), topk, hot,
            int(scheduler.max_num_seqs), int(vllm_config.model_config.max_model_len),
            int(scheduler.max_num_batched_tokens), host_bytes,
        )  # fmt: skip

    @property
    def staged_tokens(self) -> int:
        """Rows of the prompt workspace: the chunk's own, and its context up to a bound."""
        return self.batched_tokens + max(self.topk, min(self.max_context_tokens, _STAGED_TOKENS))

    @property
    def host_block_bytes(self) -> int:
        """Host bytes of one block."""
        return len(self.layer_groups) * self.block_tokens * self.row_bytes

    @property
    def host_blocks(self) -> int:
        """Blocks that the host pool can hold."""
        return self.host_bytes // self.host_block_bytes

    def config(self, blocks: int) -> HiSparseConfig:
        """The cache for a number of blocks."""
        return HiSparseConfig(
            num_layers=len(self.layer_groups),
            row_bytes=self.row_bytes,
            topk=self.topk,
            hot_tokens=self.hot_tokens,
            max_requests=self.max_requests,
            max_context_tokens=self.max_context_tokens,
            host_tokens=blocks * self.block_tokens,
            page_tokens=self.block_tokens,
            layer_groups=self.layer_groups,
        )

    def blocks(self, device_bytes: int, needed_tokens: int) -> tuple[int, str]:
        """Blocks that both memories hold, and the arithmetic; `device_bytes` is the device's budget for KV.

        Raises:
            HostMemoryError: a side that does not hold one request of `needed_tokens`, with the arithmetic.
        """
        taken = footprint(self.config(max(1, self.host_blocks)), self.staged_tokens)
        left = device_bytes - taken.total_bytes
        on_device = max(0, left) // self.index_block_bytes
        blocks = min(on_device, self.host_blocks)
        text = (
            f"{taken.explain()} of {device_bytes / (1 << 20):.1f} MiB, index keys of {on_device} blocks in the rest; "
            f"host pool of this rank {self.host_bytes / _GIB:.3f} GiB / {self.host_block_bytes} bytes a block = "
            f"{self.host_blocks} blocks; blocks: min = {blocks} of {self.block_tokens} tokens"
        )
        needed = -(-needed_tokens // self.block_tokens) + 1  # the block manager keeps one block for itself
        if blocks < needed:
            on_host = self.host_blocks < needed
            side = "hisparse.host_gib_per_node" if on_host else "hisparse: the device's KV budget"
            raise HostMemoryError(
                f"{side}: a request of {needed_tokens} tokens needs {needed} blocks; {text}; raise it, or "
                "lower --max-model-len, --max-num-seqs or hisparse.hot_tokens"
            )
        return blocks, text

    def plan(
        self, settings: HiSparseSettings, ranks: int, device_bytes: int, gather_facts: Mapping[str, Any]
    ) -> HiSparsePlan:
        """The planner's arithmetic for requests of the longest context; `gather_facts` may state `link_bytes_per_s`."""
        facts = HiSparseFacts(
            num_layers=len(self.layer_groups),
            row_bytes=self.row_bytes,
            index_row_bytes=max(1, self.index_block_bytes // (self.block_tokens * len(self.layer_groups))),
            topk=self.topk,
            context_tokens=self.max_context_tokens,
            device_kv_bytes=device_bytes,
            host_gib_per_node=settings.host_gib_per_node,
            local_ranks=ranks,
            link_bytes_per_s=gather_facts.get("link_bytes_per_s", HiSparseFacts.link_bytes_per_s),
        )
        return plan_hisparse(facts, self.hot_tokens)
