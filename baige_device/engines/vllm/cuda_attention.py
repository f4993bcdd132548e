"""vLLM's FlashMLA sparse backend with attention through `sparse_attention`, and with HiSparse's swap through our ops.

Mounted in place of the host's class of the same name, so metadata, workspaces, prefill staging and CUDA graphs stay the
host's. What the op table does not serve, and what the user switched off, stays the host's too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup

from baige_device.engines.vllm.cuda_features import CudaFeatures, cuda_features
from baige_device.engines.vllm.cuda_hisparse import COPY_SMS, split_swap

__all__ = ["FlashMlaBackend", "FlashMlaImpl"]

_LATENT = 512


class FlashMlaBackend(FlashMLASparseBackend):
    """`FLASHMLA_SPARSE` with our implementation."""

    @staticmethod
    def get_impl_cls() -> type[FlashMlaImpl]:
        return FlashMlaImpl


class FlashMlaImpl(FlashMLASparseImpl):
    """One layer. `q` is bf16, rows are 656 bytes (`fp8_ds_mla`) or 576 bf16 values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._features: CudaFeatures = cuda_features()  # before the host builds HiSparse's runtime
        super().__init__(*args, **kwargs)
        self._attends = self._features.attention and self.q_head_size == _LATENT + 64

    def _fp8_flash_mla_kernel(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, topk_indices: Tensor, kernel_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """q `[B, S, H, 576]`, rows `[P, 64, 656]`, indices `[B, S, K]` -> out `[B, S, H, 512]`, lse `[B, H, S]`."""
        if not self._attends or self.kv_cache_dtype != "fp8_ds_mla":
            return super()._fp8_flash_mla_kernel(q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata)
        out, lse = self._attend_fp8(q.flatten(0, 1), kv_c_and_k_pe_cache, topk_indices.flatten(0, 1))
        batch, queries, heads, _ = q.shape
        return out.view(batch, queries, heads, _LATENT), lse.view(batch, queries, heads).transpose(1, 2)

    def _bf16_flash_mla_kernel(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        topk_indices: Tensor,
        topk_length: Tensor | None = None,
        actual_num_heads: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q `[T, >= H, 576]`, bf16 rows `[..., 576]`, indices `[T, K]`, -1 behind `topk_length[t]` of them."""
        heads = q.shape[1] if actual_num_heads is None else actual_num_heads
        padded = out is not None and out.shape[1] != heads
        if not self._attends or padded:
            return super()._bf16_flash_mla_kernel(
                q, kv_c_and_k_pe_cache, topk_indices, topk_length, actual_num_heads, out
            )
        result, lse = self._features.ops.sparse_attention(
            q[:, :heads],
            kv_c_and_k_pe_cache.view(-1, 1, q.shape[2]),
            None,
            topk_indices.view(q.shape[0], 1, -1),
            scale=self.softmax_scale,
            v_dim=_LATENT,
            out=out,
        )
        return result, lse

    def _host_backed_fp8_decode(
        self, q: Tensor, topk_indices: Tensor, attn_metadata: Any, kernel_metadata: Any, num_decodes: int
    ) -> Tensor:
        """Under HiSparse: with overlap, attend the hits while the misses are in flight, then the misses, and merge."""
        group = self.index_group
        assert isinstance(group, HiSparseMLAIndexGroup)
        if not self._attends:
            result: Tensor = super()._host_backed_fp8_decode(
                q, topk_indices, attn_metadata, kernel_metadata, num_decodes
            )
            return result
        cache, rows = group.cache(self.index_group_index), group.physical_kv_cache(self.index_group_index)
        fits = cache.decode_batch and topk_indices.shape[0] <= cache.runtime.max_swap_rows
        if not (self._features.overlap and fits):
            found = group.convert_logical_to_physical_topk(
                self.index_group_index, topk_indices, attn_metadata, block_stride_rows=None, return_valid_counts=False
            )
            assert isinstance(found, Tensor)
            return self._attend_fp8(q, rows, found)[0]
        swap = split_swap(cache, topk_indices, attn_metadata)
        hits = self._attend_fp8(q, rows, swap.hit_rows, reserved_sms=COPY_SMS)
        swap.join()
        misses = self._attend_fp8(q, rows, swap.late_rows)  # -1 behind each list's misses
        merged: tuple[Tensor, Tensor] = self._features.ops.merge_attention(*hits, *misses)
        return merged[0]

    def _attend_fp8(self, q: Tensor, rows: Tensor, indices: Tensor, reserved_sms: int = 0) -> tuple[Tensor, Tensor]:
        """q `[T, H, 576]`, rows `[P, 64, 656]`, indices `[T, K]`."""
        out: tuple[Tensor, Tensor] = self._features.ops.sparse_attention(
            q,
            rows.view(torch.uint8).unsqueeze(-2),
            None,
            indices.unsqueeze(1),
            scale=self.softmax_scale,
            v_dim=_LATENT,
            kv_format="fp8_ds_mla",
            reserved_sms=reserved_sms,
        )
        return out
