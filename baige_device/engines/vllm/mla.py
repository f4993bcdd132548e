"""Dense MLA: all tokens attend over the latent cache (absorbed projections) through `attend_paged`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import MLAAttentionImpl

from baige_device.engines.vllm.compat import attention_name
from baige_device.engines.vllm.names import MLA
from baige_device.engines.vllm.paged import PagedBackend, PagedBatch, latent_cache, refuse_quantised_cache
from baige_device.engines.vllm.process import op_table
from baige_device.errors import MountError

__all__ = ["LatentImpl", "MlaBackend", "MlaImpl", "joined_query"]


class MlaBackend(PagedBackend):
    """`--attention-backend BAIGE_MLA`."""

    @staticmethod
    def get_name() -> str:
        return attention_name(MLA)

    @staticmethod
    def get_impl_cls() -> type[MlaImpl]:
        return MlaImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True


class LatentImpl(MLAAttentionImpl):
    """What dense and sparse MLA share: the arguments, and the latent cache's update."""

    masked_mha_available = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla: Any,
    ) -> None:
        if kv_sharing_target_layer_name is not None or alibi_slopes is not None:
            raise MountError("vllm: MLA with a shared KV cache or ALiBi is not served by our backends")
        refuse_quantised_cache(kv_cache_dtype)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.window = sliding_window or 0
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = int(mla["kv_lora_rank"])
        self.supports_quant_query_input = False
        self.ops = op_table()

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the latent `[T, R]` and the rotary key `[T, 1, P]` side by side into `[B, N, R+P]`."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        cache = latent_cache(kv_cache)
        tokens = slots.shape[0]
        self.ops.kv_write(kv_c_normed[:tokens].unsqueeze(1), cache[..., : self.kv_lora_rank], slots)
        self.ops.kv_write(k_pe[:tokens], cache[..., self.kv_lora_rank :], slots)


class MlaImpl(LatentImpl):
    """One layer's dense MLA."""

    is_sparse = False

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: PagedBatch, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend absorbed queries `[T, H, R+P]`; the result `[T, H, R]` is projected up by the host's layer."""
        batch = attn_metadata
        out, lse = self.ops.attend_paged(
            joined_query(q),
            latent_cache(kv_c_and_k_pe_cache),
            None,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            scale=self.scale,
            v_dim=self.kv_lora_rank,
            causal=batch.causal,
            window=self.window,
            logits_soft_cap=self.logits_soft_cap,
            max_query_tokens=batch.max_query_len,
            max_seq_tokens=batch.max_seq_len,
        )
        return out, lse


def joined_query(q: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The host passes the latent and the rotary part apart."""
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q
