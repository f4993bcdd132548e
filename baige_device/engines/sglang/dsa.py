"""DSA (DeepSeek Sparse Attention): SGLang's indexer module computed through `kv_write` and `index_topk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from baige_device.errors import MountError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKEND", "indexer_forward", "keep_model_dtype", "register"]

BACKEND = "dsa"
"""The attention backend that SGLang sets for DSA models; on our platform it is ours."""


def register(make_attention: Callable[[Any], Any]) -> None:
    """Take over the backend name `dsa` and the indexer's forward, on our platform only."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from baige_device.engines.sglang.platform import DISPATCH_KEY

    register_attention_backend(BACKEND)(make_attention)
    BaseFusedOp.register_oot_forward(Indexer, indexer_forward, DISPATCH_KEY)


def keep_model_dtype(server_args: Any) -> None:
    """SGLang turns a DSA model's KV dtype `auto` into bf16 or fp8 by CUDA capability; for us it stays the model's."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    from baige_device.engines.sglang.compat import resolved

    if server_args.kv_cache_dtype == "auto" and resolved(server_args).kv_cache_dtype != "auto":
        declare_resolution(server_args, "baige_device", kv_cache_dtype="auto")


def indexer_forward(
    self: Any,
    x: Tensor,
    q_lora: Tensor,
    positions: Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    **unused: Any,
) -> Tensor | None:
    """Positions `[T, K]` of the keys that each token attends to, -1 filled. Writes the new tokens' index keys first."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from baige_device.engines.sglang.attention import BaigeAttention

    backend = get_attn_backend()
    if not isinstance(backend, BaigeAttention):
        raise MountError(f"sglang: DSA indexer: expected attention backend baige, got {type(backend).__name__}")
    if self.num_init_tokens or self.num_local_tokens:
        raise MountError("sglang: DSA indexer: index_init_tokens and index_local_tokens are not served")
    if backend.forward_metadata is None:  # an idle rank of data-parallel attention
        return x.new_full((x.shape[0], self.index_topk), -1, dtype=torch.int32)
    batch, pool = backend.forward_metadata, backend.token_to_kv_pool
    keys = pool.get_index_k_with_scale_buffer(layer_id)
    q, k = _project(self, x, q_lora, positions)
    tokens = min(k.shape[0], batch.slots.shape[0])
    backend.ops.kv_write(k[:tokens, None].to(keys.dtype), keys[:, :, None], batch.slots)
    if not return_indices:
        return None
    positions_topk: Tensor = backend.ops.index_topk(
        q.to(keys.dtype),
        _gates(self, x),
        keys,
        batch.block_table,
        batch.q_starts,
        batch.seq_lens,
        topk=self.index_topk,
        max_query_tokens=batch.max_query_tokens,
        max_seq_tokens=batch.max_seq_tokens,
    )
    return positions_topk


def _project(self: Any, x: Tensor, q_lora: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries `[T, Hi, Di]` and keys `[T, Di]`, rotary embedding on their first columns."""
    tokens, rope = x.shape[0], self.rope_head_dim
    q = self.wq_b(q_lora)[0].view(tokens, self.n_heads, self.head_dim)
    k = self.k_norm(self.wk(x)[0])
    q_rope, k_rope = self.rotary_emb(positions, q[..., :rope].contiguous(), k[:, None, :rope].contiguous())
    q = torch.cat([q_rope.view(tokens, self.n_heads, rope), q[..., rope:]], dim=-1)
    k = torch.cat([k_rope.reshape(tokens, rope), k[:, rope:]], dim=-1)
    return q, k


def _gates(self: Any, x: Tensor) -> Tensor:
    """fp32 head gates `[T, Hi]` with both scales folded in. SGLang keeps their weight in bf16; the product is fp32."""
    gates = F.linear(x.float(), self.weights_proj.weight.float())
    return gates * (self.softmax_scale * self.n_heads**-0.5)
