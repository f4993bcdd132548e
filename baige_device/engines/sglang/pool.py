"""KV pools of DSA models on our platform: the latent rows as usual, the index keys unquantised beside them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from torch import Tensor

from baige_device.engines.sglang.ledger import INDEX_KEYS, LEDGER
from baige_device.errors import MountError

__all__ = ["BaigeDsaPool", "BaigeHiSparsePool", "PlainIndexKeys"]


class PlainIndexKeys(IndexKeyCache):
    """Index keys in the pool's dtype, `[P, N, Di]` a layer; offloading and transfer see whole pages, as before."""

    def _buffer_shape(self, num_pages: int) -> tuple[int, int, int]:
        return num_pages, self.pool.page_size, self.pool.index_head_dim

    def _kernel_view(self, buffer: Tensor) -> Tensor:
        return buffer

    def move(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy the keys of single tokens between slots."""
        target, source = tgt_loc.view(-1).long(), src_loc.view(-1).long()
        for keys in self.buffer:
            rows = keys.view(-1, keys.shape[-1])
            if rows.shape[0]:
                rows[target] = rows[source]


class _WithPlainIndexKeys:
    """For a pool of SGLang's: `get_index_k_with_scale_buffer` gives the indexer plain keys."""

    dtype: torch.dtype
    index_kpool: int
    index_buf_size: int

    @property
    def index_k_with_scale_buffer_dtype(self) -> torch.dtype:
        return self.dtype

    def _create_index_key_cache(self) -> PlainIndexKeys:
        LEDGER.note_seam(INDEX_KEYS)
        if self.index_kpool != 1:
            raise MountError(f"sglang: DSA index keys: expected one key a token, got index_kpool={self.index_kpool}")
        return PlainIndexKeys(self, self.index_buf_size)


class BaigeDsaPool(_WithPlainIndexKeys, DSATokenToKVPool):
    """SGLang's pool with `PlainIndexKeys`."""


class BaigeHiSparsePool(_WithPlainIndexKeys, HiSparseDSATokenToKVPool):
    """SGLang's HiSparse pool with `PlainIndexKeys`: latent rows of the hot buffers, index keys of all tokens."""

    def transfer_values_on_device(self, dst_indices: Tensor, src_indices: Tensor) -> None:
        """Copy latent rows between device rows in all layers. Upstream's is a Triton kernel."""
        target, source = dst_indices.long(), src_indices.long()
        for rows in self.kv_buffer:
            rows[target] = rows[source]

    def translate_loc_to_hisparse_device(self, compressed_indices: Tensor) -> Any:
        """Rows for logical slots; -1 stays -1 (the map's last entry). Upstream's is a Triton kernel for 1-D lists."""
        return self._translate_loc_to_hisparse_device(compressed_indices)
