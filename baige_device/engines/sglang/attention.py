"""Our attention backend: dense GQA, MLA and DSA, every cache write and every softmax through the op table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import Tensor

from baige_device.activation import Activation
from baige_device.engines.sglang.batch import RaggedBatch, make_batch
from baige_device.engines.sglang.compat import kv_pool_kind, window_tokens
from baige_device.engines.sglang.hisparse_attend import make_rows
from baige_device.errors import MountError
from baige_device.ops.attend_paged.contract import FLOATS

__all__ = ["BaigeAttention", "pages"]


class BaigeAttention(AttentionBackend):
    """One instance a model runner. SGLang reads both pools from it."""

    use_mha = False
    """SGLang's handler of DSA models asks; we always take the absorbed (MLA) form."""

    def __init__(self, runner: Any, activation: Activation) -> None:
        super().__init__()
        self.forward_metadata: RaggedBatch | None = None
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.ops = activation.ops
        self.page_tokens = int(self.token_to_kv_pool.page_size)
        self.is_mla = kv_pool_kind(self.token_to_kv_pool) == "mla"
        if self.token_to_kv_pool.dtype not in FLOATS:
            raise MountError(
                f"sglang: attention backend baige: --kv-cache-dtype: expected bf16, fp16 or fp32, got "
                f"{self.token_to_kv_pool.dtype}"
            )
        self.hisparse = make_rows(runner, activation.settings.hisparse.overlap)
        for name, module in runner.model.named_modules():
            if isinstance(module, RadixAttention):
                _refuse_unknown_layer(name, module)

    # ---- what SGLang calls once a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        batch = make_batch(forward_batch, self.req_to_token_pool.req_to_token, self.page_tokens)
        if self.hisparse is not None:
            batch = replace(batch, latent_slots=self.hisparse.device_rows(batch.slots))
            self.hisparse.observe()
        self.forward_metadata = batch

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padded request."""
        return 0

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The same; SGLang asks by this name on device type cpu."""
        return 0

    def support_triton(self) -> bool:
        return False

    # ---- what SGLang calls once a layer

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        topk_indices: Tensor | None = None,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Write the new rows, attend, and return `[T, H·Dv]`."""
        _refuse_unknown_arguments(unknown)
        batch = self.forward_metadata
        assert batch is not None, "SGLang prepares every step but an idle one, and runs no layer in that"
        q = _queries(q, q_rope, layer)
        if save_kv_cache and k is not None:
            self._write(k, v, k_rope, layer, batch)
        if topk_indices is None:
            out = self._dense(q, layer, batch)
        else:
            out = self._sparse(q, topk_indices[: q.shape[0]], layer, batch, forward_batch)
        return out.view(q.shape[0], -1)

    forward_decode = forward_extend

    def _write(self, k: Tensor, v: Tensor | None, k_rope: Tensor | None, layer: Any, batch: RaggedBatch) -> None:
        pool = self.token_to_kv_pool
        keys = pages(pool.get_key_buffer(layer.layer_id), self.page_tokens)
        if not self.is_mla:
            assert v is not None
            values = pages(pool.get_value_buffer(layer.layer_id), self.page_tokens)
            self.ops.kv_write(k.view(-1, *keys.shape[2:]), keys, batch.slots)
            self.ops.kv_write(v.view(-1, *values.shape[2:]), values, batch.slots)
            return
        k = k.view(k.shape[0], 1, -1)
        if k_rope is None:
            self.ops.kv_write(k, keys, batch.latent_slots)
            return
        latent = k.shape[2]
        self.ops.kv_write(k, keys[..., :latent], batch.latent_slots)
        self.ops.kv_write(k_rope.view(k.shape[0], 1, -1), keys[..., latent:], batch.latent_slots)

    def _dense(self, q: Tensor, layer: Any, batch: RaggedBatch) -> Tensor:
        if self.hisparse is not None:
            raise MountError("sglang: HiSparse: expected the top-k of an indexer at every layer, got dense attention")
        pool = self.token_to_kv_pool
        out, _ = self.ops.attend_paged(
            q,
            pages(pool.get_key_buffer(layer.layer_id), self.page_tokens),
            None if self.is_mla else pages(pool.get_value_buffer(layer.layer_id), self.page_tokens),
            batch.block_table,
            batch.q_starts,
            batch.seq_lens,
            scale=layer.scaling,
            v_dim=layer.v_head_dim if self.is_mla else 0,
            window=window_tokens(layer),
            logits_soft_cap=layer.logit_cap,
            max_query_tokens=batch.max_query_tokens,
            max_seq_tokens=batch.max_seq_tokens,
        )
        return out

    def _sparse(self, q: Tensor, topk: Tensor, layer: Any, batch: RaggedBatch, forward_batch: Any) -> Tensor:
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)

        def attend(rows: Tensor) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = self.ops.sparse_attention(
                q, cache, None, rows[:, None], scale=layer.scaling, v_dim=layer.v_head_dim
            )
            return result

        if self.hisparse is None:
            return attend(batch.rows(topk))[0]
        if not forward_batch.forward_mode.is_decode():
            return attend(self.hisparse.device_rows(batch.rows(topk)))[0]
        return self.hisparse.attend(attend, self.ops.merge_attention, topk, layer.layer_id, forward_batch)


def pages(buffer: Tensor, page_tokens: int) -> Tensor:
    """A pool's rows `[S, G, D]` as pages `[P, N, G, D]`; a view."""
    whole = buffer.shape[0] // page_tokens
    return buffer[: whole * page_tokens].unflatten(0, (whole, page_tokens))


def _queries(q: Tensor, q_rope: Tensor | None, layer: Any) -> Tensor:
    q = q.view(q.shape[0], layer.tp_q_head_num, -1)
    if q_rope is None:
        return q
    return torch.cat([q, q_rope.view(q.shape[0], layer.tp_q_head_num, -1)], dim=-1)


def _refuse_unknown_arguments(unknown: dict[str, Any]) -> None:
    given = sorted(name for name, value in unknown.items() if value is not None)
    if given:
        raise MountError(f"sglang: attention backend baige: the model passes {', '.join(given)}, which no op takes")


def _refuse_unknown_layer(name: str, layer: Any) -> None:
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise MountError(
            f"sglang: attention backend baige: {name}: expected causal self-attention, got attn_type="
            f"{layer.attn_type}, cross attention {layer.is_cross_attention}"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise MountError(f"sglang: {name}: logit_capping_method: expected tanh, got {layer.logit_capping_method!r}")
    if layer.xai_temperature_len > 0:
        raise MountError(f"sglang: {name}: xai_temperature_len: expected none, got {layer.xai_temperature_len}")
