"""The batch as our attention ops take it, and views of vLLM's paged caches in the ops' shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf

from baige_device.errors import MountError

__all__ = ["PagedBackend", "PagedBatch", "PagedBatchBuilder", "dense_caches", "latent_cache", "refuse_quantised_cache"]


@dataclass
class PagedBatch:
    """One step's ragged batch, shared by all layers of a KV cache group.

    The field names are those that vLLM's layers read. MLA layers split a batch into decodes, which run on the latent
    cache, and prefills, which are projected up; the ops take any query length, so all tokens count as decodes.
    """

    num_reqs: int
    num_actual_tokens: int
    """Tokens without graph padding."""
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    """int32 `[B+1]`."""
    seq_lens: Tensor
    """int32 `[B]`."""
    block_table: Tensor
    """int32 `[B, M]`."""
    slot_mapping: Tensor
    """int64 `[T]`; -1 is padding."""
    causal: bool
    num_prefills: int = 0
    prefill: None = None

    @property
    def num_decodes(self) -> int:
        return self.num_reqs

    @property
    def num_decode_tokens(self) -> int:
        return self.num_actual_tokens

    @property
    def decode(self) -> PagedBatch:
        return self

    @cached_property
    def request_of_token(self) -> Tensor:
        """int64 `[num_actual_tokens]`; made once per step, when the first sparse layer asks."""
        lengths = self.query_start_loc.diff()
        requests = torch.arange(lengths.shape[0], device=lengths.device)
        return torch.repeat_interleave(requests, lengths, output_size=self.num_actual_tokens)


class PagedBatchBuilder(AttentionMetadataBuilder):
    """Turns vLLM's per-step metadata into a `PagedBatch`; copies nothing."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedBatch:
        step = common_attn_metadata
        if not isinstance(step.causal, bool):
            raise MountError("vllm: attention whose causality differs by request is not served by our backends")
        return PagedBatch(
            num_reqs=step.num_reqs,
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_table=step.block_table_tensor,
            slot_mapping=step.slot_mapping,
            causal=step.causal,
        )


class PagedBackend(AttentionBackend):
    """What our attention backends have in common."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012 (the host's own declaration)

    @staticmethod
    def get_builder_cls() -> type[PagedBatchBuilder]:
        return PagedBatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The page size of the chip's kernels, where our platform knows it; `--block-size` goes before it."""
        from vllm.platforms import current_platform

        return getattr(type(current_platform), "page_tokens", 0) or super().get_preferred_block_size(default_block_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


def refuse_quantised_cache(kv_cache_dtype: str) -> None:
    """Our attention reads the cache as it was written, in a floating-point type without scales."""
    if kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise MountError(f"vllm: --kv-cache-dtype: expected auto, float16, bfloat16 or float32, got {kv_cache_dtype}")


def dense_caches(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """vLLM's `[B, G, N, D+Dv]` with keys and values side by side -> keys `[B, N, G, D]` and values `[B, N, G, Dv]`."""
    paged = kv_cache.permute(0, 2, 1, 3)
    return paged[..., :head_size], paged[..., head_size:]


def latent_cache(kv_cache: Tensor) -> Tensor:
    """vLLM's latent or index cache `[B, N, C]` -> `[B, N, 1, C]`."""
    return kv_cache.unsqueeze(2)
