"""DSA's indexer on the generic DeepSeek model: unquantised keys through `kv_write`, the top-k through `index_topk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baige_device.activation import current
from baige_device.engines.vllm.compat import attention_name, index_cache_spec
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.names import INDEXER
from baige_device.engines.vllm.paged import PagedBackend, PagedBatch, latent_cache

__all__ = ["IndexerBackend", "mount_indexer"]

_MODEL = "vllm.model_executor.models.deepseek_v2"


class IndexerBackend(PagedBackend):
    """Metadata of the index cache; it has no attention of its own."""

    @staticmethod
    def get_name() -> str:
        return attention_name(INDEXER)

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError(f"{INDEXER} holds a cache, it does not attend")


def mount_indexer() -> None:
    """Replace cache layout, backend and forward of the host's indexer."""
    LEDGER.patch(f"{_MODEL}:DeepseekV32IndexerCache.get_attn_backend", lambda _: _get_attn_backend)
    LEDGER.patch(f"{_MODEL}:DeepseekV32IndexerCache.get_kv_cache_spec", lambda _: _get_kv_cache_spec)
    LEDGER.patch(f"{_MODEL}:Indexer.forward", lambda _: _forward)


def _get_attn_backend(self: Any) -> type[IndexerBackend]:
    return IndexerBackend


def _get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
    model = vllm_config.model_config
    return index_cache_spec(vllm_config.cache_config.block_size, model.hf_text_config.index_head_dim, model.dtype)


def _forward(self: Any, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: Callable[..., Any]) -> Tensor:
    """Write this step's index keys and fill the top-k buffer with positions `[T, K]`, -1 where there are fewer."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    buffer: Tensor = self.topk_indices_buffer
    if not isinstance(context.attn_metadata, dict):
        return buffer
    batch: PagedBatch = context.attn_metadata[self.k_cache.prefix]
    slots: Tensor = context.slot_mapping[self.k_cache.prefix]
    q, k, weights = _project(self, hidden_states, qr, positions, rotary_emb)
    cache = self.k_cache.kv_cache
    ops = current().ops
    ops.kv_write(k[: slots.shape[0]].unsqueeze(1), latent_cache(cache), slots)
    ops.index_topk(
        q,
        weights,
        cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        topk=self.topk_tokens,
        max_query_tokens=batch.max_query_len,
        max_seq_tokens=batch.max_seq_len,
        out=buffer[: q.shape[0]],
    )
    return buffer


def _project(
    self: Any, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: Callable[..., Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries `[T, Hi, Di]` and keys `[T, Di]`, first `rope_dim` columns rotated, and fp32 head weights."""
    rope, width = self.rope_dim, self.head_dim
    q = self.wq_b(qr)[0].view(-1, self.n_head, width)
    fused = self.wk_weights_proj(hidden_states)[0]
    k = self.k_norm(fused[:, :width])
    q_rope, k_rope = rotary_emb(positions, q[..., :rope].contiguous(), k[:, None, :rope].contiguous())
    q = torch.cat((q_rope.reshape(-1, self.n_head, rope), q[..., rope:]), dim=-1)
    k = torch.cat((k_rope.reshape(-1, rope), k[:, rope:]), dim=-1)
    weights = fused[:, width:].float() * (self.softmax_scale * self.n_head_scale)
    dtype = self.k_cache.kv_cache.dtype
    return q.to(dtype), k.to(dtype), weights
