"""Dense attention (MHA, GQA, MQA; sliding window, soft cap) through `attend_paged` and `kv_write`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from baige_device.engines.vllm.compat import attention_name
from baige_device.engines.vllm.names import DENSE
from baige_device.engines.vllm.paged import PagedBackend, PagedBatch, dense_caches, refuse_quantised_cache
from baige_device.engines.vllm.process import op_table
from baige_device.errors import MountError

__all__ = ["DenseBackend", "DenseImpl"]


class DenseBackend(PagedBackend):
    """`--attention-backend BAIGE`."""

    @staticmethod
    def get_name() -> str:
        return attention_name(DENSE)

    @staticmethod
    def get_impl_cls() -> type[DenseImpl]:
        return DenseImpl


class DenseImpl(AttentionImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise MountError(f"vllm: {DENSE} serves decoder attention without ALiBi, got {attn_type}, {alibi_slopes}")
        refuse_quantised_cache(kv_cache_dtype)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.window = sliding_window or 0
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.ops = op_table()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys `[T, G, D]` and values `[T, G, Dv]`; rows behind the slot mapping are graph padding."""
        tokens = slot_mapping.shape[0]
        keys, values = dense_caches(kv_cache, self.head_size)
        self.ops.kv_write(key[:tokens], keys, slot_mapping)
        self.ops.kv_write(value[:tokens], values, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedBatch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend queries `[T, H, D]` into `output` `[T, H, Dv]`; without metadata (profiling) it is zero."""
        if attn_metadata is None:
            return output.zero_()
        batch = attn_metadata
        keys, values = dense_caches(kv_cache, self.head_size)
        self.ops.attend_paged(
            query,
            keys,
            values,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            scale=self.scale,
            causal=batch.causal,
            window=self.window,
            logits_soft_cap=self.logits_soft_cap,
            max_query_tokens=batch.max_query_len,
            max_seq_tokens=batch.max_seq_len,
            out=output,
        )
        return output
