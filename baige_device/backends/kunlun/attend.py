"""`attend_paged` over the vendor's kernels.

GQA runs `prefill_attention`, the dense kernel that returns an LSE and takes a cached prefix, for prefill and decode
alike; `speculative_attention` and `paged_attention`, the decode kernels, return none. MLA with rows of 576 runs the
sparse kernels over the full lists of visible rows, 2048 a call, merged by LSE.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from baige_device.backends.kunlun import mla_dense, normalise, partial, vendor
from baige_device.backends.kunlun.batch import Batch, read_batch
from baige_device.backends.kunlun.kv_write import HALF
from baige_device.backends.kunlun.limits import ATTENTION_HEAD_SIZES, MLA_HEAD_SIZE, MLA_VALUE_SIZE, PAGED_BLOCK_TOKENS
from baige_device.errors import ContractError

__all__ = ["attend_paged", "window_left"]

_OP = "attend_paged"
_NO_WINDOW = -1


def attend_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_dim: int = 0,
    causal: bool = True,
    window: int = 0,
    logits_soft_cap: float = 0.0,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract; bf16 and fp16, no soft cap, a window only with causality. Reads the lengths (see `host_twins`).

    The kernel reads the cache in place when its pages are `[P, G, N, D]` in memory (G = 1 always is) and its head size
    is one of the kernel's; otherwise the batch's keys and values are first gathered and padded with zeros.
    """
    _refuse_others(q, k_cache, causal, window, logits_soft_cap)
    batch = read_batch(q_starts, seq_lens)
    width = v_dim if v_cache is None else v_cache.shape[3]
    latent = v_cache is None and (q.shape[2], width) == (MLA_HEAD_SIZE.value, MLA_VALUE_SIZE.value)
    if not latent and max(q.shape[2], width) > ATTENTION_HEAD_SIZES[-1]:
        expected = f"up to {ATTENTION_HEAD_SIZES[-1]} columns, or MLA rows of 576 with v_dim=512"
        raise ContractError(_OP, "q.shape[2]", expected, f"{q.shape[2]} with values of {width}")
    tokens, heads, _ = q.shape
    total = normalise.filled_lse(tokens, heads, q.device)
    if batch.tokens == 0 or batch.longest == 0:
        return partial.deliver(q.new_zeros(tokens, heads, width), total, None, out, lse)
    queries = normalise.dense(q[: batch.tokens])
    if latent:
        result, total = mla_dense.attend(queries, k_cache.squeeze(2), block_table, batch, scale, causal, window)
    elif v_cache is not None and _in_place(k_cache, v_cache):
        pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        result, total = _prefill(queries, *pages, block_table, batch, scale, causal, window)
    else:
        keys, values, size = _gather(k_cache, v_cache, block_table, batch, width)
        queries = functional.pad(queries, (0, size - q.shape[2]))
        result, total = _prefill(queries, keys, values, None, batch, scale, causal, window)
        result = result[..., :width]
    spare = tokens - batch.tokens
    result = functional.pad(result, (0, 0, 0, 0, 0, spare))
    total = functional.pad(total, (0, 0, 0, spare))
    return partial.deliver(result, total, batch.seen(tokens), out, lse)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    batch: Batch,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """k and v are pages `[P, G, N, D]` with a block table, or `[sum of lengths, G, D]` without."""
    result = normalise.zeros(q.shape, q.dtype, q.device)
    total = normalise.filled_lse(q.shape[0], q.shape[1], q.device)
    q_host, q_device = normalise.length_pair(batch.q_starts, q.device)
    kv_host, kv_device = normalise.length_pair(batch.kv_starts, q.device)
    vendor.kernel_module().prefill_attention(
        q,
        k,
        v,
        result,
        causal,
        is_prefix_cache=block_table is not None,
        alpha=normalise.prefill_alpha(scale, q.shape[2]),
        block_table=None if block_table is None else normalise.int32(block_table),
        context_qlen_lod_cpu=q_host,
        context_qlen_lod_xpu=q_device,
        context_kvlen_lod_cpu=kv_host,
        context_kvlen_lod_xpu=kv_device,
        alibi_slopes=None,
        softmax_lse=total,
        swa_left=window_left(window),
        swa_right=0 if window else _NO_WINDOW,
        sink=None,
    )
    return result, total


def window_left(window: int) -> int:
    """The kernel's `swa_left`: keys before the query's own. The self-test `window_counts_self` confirms the reading."""
    return window - 1 if window else _NO_WINDOW


def _in_place(k_cache: Tensor, v_cache: Tensor) -> bool:
    return (
        k_cache.shape[1] in PAGED_BLOCK_TOKENS
        and k_cache.shape[3] == v_cache.shape[3]
        and k_cache.shape[3] in ATTENTION_HEAD_SIZES
        and k_cache.transpose(1, 2).is_contiguous()
        and v_cache.transpose(1, 2).is_contiguous()
    )


def _gather(
    k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, batch: Batch, width: int
) -> tuple[Tensor, Tensor, int]:
    """The batch's keys and values, request by request, with zero columns up to a head size that the kernel takes."""
    request, position = batch.key_tokens()
    page_tokens = k_cache.shape[1]
    page = block_table[request, position // page_tokens].long()
    keys = k_cache[page, position % page_tokens]
    values = keys[..., :width] if v_cache is None else v_cache[page, position % page_tokens]
    size = next(size for size in ATTENTION_HEAD_SIZES if size >= max(keys.shape[2], width))
    return (
        normalise.dense(functional.pad(keys, (0, size - keys.shape[2]))),
        normalise.dense(functional.pad(values, (0, size - width))),
        size,
    )


def _refuse_others(q: Tensor, k_cache: Tensor, causal: bool, window: int, soft_cap: float) -> None:
    if q.dtype not in HALF or k_cache.dtype != q.dtype:
        got = f"{q.dtype} and {k_cache.dtype}"
        raise ContractError(_OP, "q.dtype", "bf16 or fp16 on Kunlun, equal to the cache's", got)
    if soft_cap:
        raise ContractError(_OP, "logits_soft_cap", "0 (the Kunlun kernels have none)", str(soft_cap))
    if window and not causal:
        raise ContractError(_OP, "window", "0 without causality on Kunlun", str(window))
