"""DSA's attention: each token attends over the top-k rows of the latent cache, through `sparse_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config

from baige_device.engines.vllm.compat import attention_name
from baige_device.engines.vllm.hisparse_options import hisparse_on
from baige_device.engines.vllm.mla import LatentImpl, joined_query
from baige_device.engines.vllm.names import SPARSE
from baige_device.engines.vllm.paged import PagedBackend, PagedBatch, latent_cache
from baige_device.errors import MountError

__all__ = ["SparseMlaBackend", "SparseMlaImpl", "physical_rows"]


class SparseMlaBackend(PagedBackend):
    """`--attention-backend BAIGE_MLA_SPARSE`."""

    @staticmethod
    def get_name() -> str:
        return attention_name(SPARSE)

    @staticmethod
    def get_impl_cls() -> type[SparseMlaImpl]:
        return SparseMlaImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class SparseMlaImpl(LatentImpl):
    """One layer's sparse MLA. The positions come from the indexer's buffer, which layers may share."""

    is_sparse = True
    supports_dense_mha_prefill = False
    rows_on_host = False
    """Whether this class serves a start with HiSparse."""

    def __init__(
        self, *args: Any, indexer: Any = None, topk_indices_buffer: Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if hisparse_on(get_current_vllm_config()) and not self.rows_on_host:
            raise MountError(
                "vllm: hisparse.host_gib_per_node is set, and on another's platform BAIGE_MLA_SPARSE keeps all its "
                "rows on the device; leave it at 0, or choose the platform's own attention backend"
            )
        self._indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> Tensor | None:
        """int32 `[max tokens, K]`. Read from the indexer each time: speculative decoding exchanges its buffer."""
        if self._indexer is not None:
            buffer: Tensor | None = self._indexer.topk_indices_buffer
            return buffer
        return self._topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: Tensor) -> None:
        self._indexer = None
        self._topk_indices_buffer = buffer

    def record_logical_topk_ready(self) -> None:
        """The host's note that the indexer has run; nothing here waits for it."""

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: PagedBatch, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend absorbed queries `[T, H, R+P]` over their rows."""
        query = joined_query(q)
        buffer = self.topk_indices_buffer
        assert buffer is not None
        rows = physical_rows(buffer[: query.shape[0]], attn_metadata, kv_c_and_k_pe_cache.shape[1])
        out, lse = self.ops.sparse_attention(
            query,
            latent_cache(kv_c_and_k_pe_cache),
            None,
            rows.unsqueeze(1),
            scale=self.scale,
            v_dim=self.kv_lora_rank,
        )
        return out, lse


def physical_rows(positions: Tensor, batch: PagedBatch, page_tokens: int) -> Tensor:
    """Positions within each token's request `[T, K]` (-1 is none) -> rows of the paged pool, int64 `[T, K]`."""
    valid = positions >= 0
    where = positions.clamp_min(0).long()
    pages = batch.block_table[batch.request_of_token.unsqueeze(1), where // page_tokens].long()
    return torch.where(valid, pages * page_tokens + where % page_tokens, -1)
