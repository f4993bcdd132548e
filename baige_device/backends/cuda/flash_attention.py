"""`attend_paged` through FlashAttention 3 (`flash_attention_library` finds it).

A call outside its shapes (fp32, other head sizes, caches whose rows are not aligned to 16 bytes, a scale that is not
positive) goes to the Triton kernel, and so does a decode step with a small window, which is faster there: the choice
depends on shapes and hints alone, so it is the same in every step and inside a captured graph.

It reads whole pages where their size is a multiple of its key block, garbage past the length included, and 0 times NaN
is NaN. Left padding of 0 makes it read row by row, with zeros past the length, as it does for small pages.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baige_device.backends.cuda.flash_attention_kernels import finish_kernel
from baige_device.backends.cuda.flash_attention_library import FlashAttention, find_flash_attention
from baige_device.backends.cuda.flash_attention_shapes import ALIGNMENT, DTYPES, head_sizes_fit
from baige_device.backends.portable.attend_paged import SPLIT_BYTES
from baige_device.backends.portable.attend_paged import attend_paged as portable
from baige_device.backends.portable.runtime import launching_on, power_of_2, processors
from baige_device.errors import BackendError

__all__ = ["attend_paged"]

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_SMALLEST_BLOCK = 64
"""It reads whole pages only where they are as large as its blocks of keys, and there are more rows than in a block."""
_BLOCK_ROWS = 128
"""Of queries times heads, and of keys, that one block of its kernels takes, roughly: head sizes move it."""
_SMALL_WINDOW_TOKENS = 256
_MOST_SPLITS = 128


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
    """See `baige_device/ops/attend_paged/contract.py`. Tables and lengths of int64 are converted, a launch each."""
    width = v_dim if v_cache is None else v_cache.shape[3]
    tokens = q.shape[0]
    queries = min(max_query_tokens or tokens, tokens)
    small = queries == 1 and 0 < window <= _SMALL_WINDOW_TOKENS
    if scale <= 0 or small or not _fits(q, k_cache, v_cache, width, block_table):
        return portable(
            q,
            k_cache,
            v_cache,
            block_table,
            q_starts,
            seq_lens,
            scale=scale,
            v_dim=v_dim,
            causal=causal,
            window=window,
            logits_soft_cap=logits_soft_cap,
            max_query_tokens=max_query_tokens,
            max_seq_tokens=max_seq_tokens,
            out=out,
            lse=lse,
        )
    heads, (_, page_tokens, groups, _) = q.shape[1], k_cache.shape
    keys = block_table.shape[1] * page_tokens
    keys = min(max_seq_tokens or keys, keys)
    q, k = _aligned(q), _plain_strides(k_cache)
    q_v, v = None, None if v_cache is None else _plain_strides(v_cache)
    if v is None:
        q_v, v, q, k = q[..., :width], k[..., :width], q[..., width:], k[..., width:]
    lens, rows = _dense_int32(seq_lens), queries * (heads // groups)
    by_row = page_tokens >= _SMALLEST_BLOCK and rows > _SMALLEST_BLOCK
    result, raw_lse = _library()(
        q=q,
        k=k,
        v=v,
        q_v=q_v,
        out=out if out is not None and _is_aligned(out) else None,
        cu_seqlens_q=_dense_int32(q_starts),
        seqused_k=lens,
        max_seqlen_q=queries,
        max_seqlen_k=keys,
        page_table=_dense_int32(block_table),
        leftpad_k=torch.zeros_like(lens) if by_row else None,
        softmax_scale=scale,
        is_causal=causal,
        window_size_left=window - 1,  # -1 is no bound
        window_size_right=0 if causal else -1,
        softcap=logits_soft_cap,
        num_splits=_splits(rows, groups, keys, window, tokens * heads * width, q.device),
    )
    if out is None:
        out = result
    elif result.data_ptr() != out.data_ptr():
        out.copy_(result)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if lse is None else lse
    _finish(raw_lse, out, lse, q_starts)
    return out, lse


def _fits(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, width: int, block_table: Tensor) -> bool:
    """Whether FlashAttention takes these shapes, and there is anything to attend."""
    if 0 in (*q.shape, *k_cache.shape, *block_table.shape) or q.dtype not in _DTYPES or k_cache.dtype != q.dtype:
        return False
    if not head_sizes_fit(q.shape[2], width, v_cache is None):
        return False
    return _is_aligned(k_cache) and (v_cache is None or _is_aligned(v_cache))


def _is_aligned(tensor: Tensor) -> bool:
    """Whether every row of the last dimension starts at a multiple of 16 bytes and is dense."""
    if tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
        return False
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(size == 1 or stride % ALIGNMENT == 0 for size, stride in outer)


def _aligned(q: Tensor) -> Tensor:
    return _plain_strides(q) if _is_aligned(q) else torch.empty(q.shape, dtype=q.dtype, device=q.device).copy_(q)


def _plain_strides(tensor: Tensor) -> Tensor:
    """The same rows; a dimension of size 1 gets a dense stride, since descriptors are encoded from all strides."""
    shape, strides = tensor.shape, list(tensor.stride())
    for dim in range(tensor.dim() - 2, -1, -1):
        if shape[dim] == 1:
            strides[dim] = shape[dim + 1] * strides[dim + 1]
    return tensor if tuple(strides) == tensor.stride() else tensor.as_strided(shape, strides)


def _dense_int32(tensor: Tensor) -> Tensor:
    """The op wants int32 whose last stride is 1 even where there is one column."""
    if tensor.dtype == torch.int32 and tensor.stride(-1) == 1:
        return tensor
    return torch.empty(tensor.shape, dtype=torch.int32, device=tensor.device).copy_(tensor)


@functools.lru_cache(maxsize=1)
def _library() -> FlashAttention:
    found, reason = find_flash_attention()
    if found is None:
        raise BackendError(f"cuda: FlashAttention was offered and is gone: {reason}")
    return found


@functools.lru_cache(maxsize=4096)
def _splits(rows: int, groups: int, keys: int, window: int, outputs: int, device: torch.device) -> int:
    """Most parts of a request's keys; the kernel itself takes fewer where the batch fills the device.

    `rows` are the (query, head) pairs of the longest request and kv head: it may be alone in the batch. Its own rule
    bounds no memory: 3.8 GB for 256 requests of 8192 tokens with DeepSeek's latent.
    """
    blocks = groups * -(-rows // _BLOCK_ROWS)
    keys = min(keys, window + rows) if window else keys
    if 5 * blocks >= 4 * processors(device) or keys <= 4 * _BLOCK_ROWS:
        return 1
    most = min(processors(device) // blocks, -(-keys // _BLOCK_ROWS), SPLIT_BYTES // (4 * outputs), _MOST_SPLITS)
    return max(1, most)


def _finish(raw_lse: Tensor, out: Tensor, lse: Tensor, q_starts: Tensor) -> None:
    """Write the log-sum-exps `[T, H]` from the op's `[H, T]`, and 0 and -inf into the rows of no request."""
    tokens, heads, width = out.shape
    block = min(32, power_of_2(heads, 1))
    with launching_on(out):
        finish_kernel[(-(-tokens // 16), -(-heads // block))](
            raw_lse,
            out,
            lse,
            q_starts,
            q_starts.stride(0),
            q_starts.shape[0] - 1,
            tokens,
            heads,
            *raw_lse.stride(),
            *out.stride()[:2],
            *lse.stride(),
            WIDTH=width,
            WIDTH_BLOCK=power_of_2(width),
            ROWS=16,
            HEADS=block,
        )
