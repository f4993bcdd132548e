"""`index_topk` with the vendor's int8 indexer: paged logits for decode, gathered keys for prefill, then top-k.

Queries and keys are int8. The scales of the queries are folded into `weights`, those of the keys come as `k_scales`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, vendor
from baige_device.backends.kunlun.batch import Batch, read_batch
from baige_device.backends.kunlun.limits import (
    FAST_TOPK,
    INDEX_DECODE_QUERY_TOKENS,
    INDEX_HEAD_SIZE,
    INDEX_LOGITS_BYTES,
    INDEX_PAGE_TOKENS,
)
from baige_device.errors import ContractError

__all__ = ["contiguous_pages", "index_topk", "page_aligned"]

_OP = "index_topk"


def index_topk(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    q_starts: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    k_scales: Tensor | None = None,
    max_query_tokens: int = 0,
    max_seq_tokens: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """See the contract; int8 with `k_scales`, 128 columns. Reads the lengths (see `normalise.host_twins`).

    Logits are held in fp32, at most 1 GiB at once.
    """
    if q.dtype != torch.int8 or k_scales is None or q.shape[2] != INDEX_HEAD_SIZE.value:
        raise ContractError(_OP, "q", "int8 [T, Hi, 128] with k_scales", f"{q.dtype} of {q.shape[2]} columns")
    batch = read_batch(q_starts, seq_lens)
    found = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    decode = batch.most_queries <= INDEX_DECODE_QUERY_TOKENS.value and k_cache.shape[1] == INDEX_PAGE_TOKENS.value
    for low, high in _chunks(batch):
        visible = (batch.last_position[low:high] + 1).clamp(min=0)
        score = _decode_logits if decode else _prefill_logits
        logits = score(q[low:high], weights[low:high], k_cache, k_scales, block_table, batch, low, high, visible)
        if logits is not None:
            found[low:high] = _topk(logits, visible.to(q.device), topk)
    return found if out is None else out.copy_(found)


def _chunks(batch: Batch) -> list[tuple[int, int]]:
    """Ranges of query tokens whose logits fit the buffer."""
    step = max(1, INDEX_LOGITS_BYTES.value // (4 * max(1, batch.longest)))
    return [(low, min(low + step, batch.tokens)) for low in range(0, batch.tokens, step)]


def page_aligned(length: int) -> int:
    """`max_context_len` of the paged kernel: a multiple of its page."""
    return -(-length // INDEX_PAGE_TOKENS.value) * INDEX_PAGE_TOKENS.value


def _decode_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    k_scales: Tensor,
    block_table: Tensor,
    batch: Batch,
    low: int,
    high: int,
    visible: Tensor,
) -> Tensor | None:
    """fp32 `[t, width]`. Every query is a request of one token that sees its own prefix, which makes it causal."""
    if int(visible.max()) == 0:
        return None
    width = page_aligned(batch.longest)
    blocks = -(-width // INDEX_PAGE_TOKENS.value)
    request = batch.request_of_token[low:high].to(q.device)
    lens = torch.tensor(batch.seq_lens, device=q.device).unsqueeze(1)
    needed = torch.arange(blocks, device=q.device) * INDEX_PAGE_TOKENS.value < lens
    pages = torch.where(needed, block_table[:, :blocks].long(), 0) if block_table.shape[1] else needed.long()
    keys, table = contiguous_pages(k_cache, pages)
    scales = k_scales[pages].flatten(1)[:, :width]
    logits = normalise.zeros((q.shape[0], 1, width), torch.float32, q.device)
    lengths = normalise.length_pair(visible.tolist(), q.device)
    vendor.kernel_module().I8_paged_mqa_logits(
        normalise.dense(q).unsqueeze(1),
        [keys.unsqueeze(2), normalise.dense(scales[request])],
        normalise.dense(weights).unsqueeze(1),
        list(lengths),
        normalise.int32(table[request]),
        width,
        True,
        logits,
        use_xfa_boost=False,
    )
    return logits.squeeze(1)


def contiguous_pages(k_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous `[P', 64, 128]` pages and the table into them.

    The kernel addresses keys by `page * 64 * 128` from the start and ignores strides, so a view into a cache that
    keeps scales beside the keys would be read wrongly; of such a cache the batch's pages are copied.
    """
    if k_cache.is_contiguous():
        return k_cache, pages
    return normalise.dense(k_cache[pages.flatten()]), torch.arange(pages.numel(), device=pages.device).view_as(pages)


def _prefill_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    k_scales: Tensor,
    block_table: Tensor,
    batch: Batch,
    low: int,
    high: int,
    visible: Tensor,
) -> Tensor | None:
    """fp32 `[t, width]`, every row from column 0 (the layout for several requests), masked behind the own key."""
    part = _part(batch, low, high)
    if part.longest == 0:
        return None
    request, position = part.key_tokens()
    page_tokens = k_cache.shape[1]
    first = int(batch.request_of_token[low])
    page = block_table[request + first, position // page_tokens].long()
    keys, scales = k_cache[page, position % page_tokens], k_scales[page, position % page_tokens]
    logits = torch.full((q.shape[0], part.longest), -math.inf, dtype=torch.float32, device=q.device)
    kv_lod = normalise.length_pair(part.kv_starts, q.device)
    vendor.kernel_module().I8_mqa_logits(
        normalise.dense(q),
        (normalise.dense(keys), normalise.dense(scales)),
        normalise.dense(weights),
        normalise.length_pair(part.q_starts, q.device),
        kv_lod,
        logits,
        True,
        max_seq_q=part.most_queries,
        max_seq_k=part.longest,
        is_causal=False,
        use_xfa_boost=False,
    )
    stop = normalise.int32(visible.to(q.device))
    vendor.speed_ops().mask_for_I8_mqa_logits(kv_lod[1], torch.zeros_like(stop), stop, logits)
    return logits


def _part(batch: Batch, low: int, high: int) -> Batch:
    """The requests that own query tokens `low:high`, with only those queries."""
    owners = batch.request_of_token[[low, high - 1]].tolist()
    first, last = owners[0], owners[1] + 1
    starts = [min(max(start, low), high) - low for start in batch.q_starts[first : last + 1]]
    return Batch(starts, batch.seq_lens[first:last], batch.device)


def _topk(logits: Tensor, visible: Tensor, topk: int) -> Tensor:
    """int32 `[t, topk]`: the columns of the largest visible logits, -1 behind. Rows that see nothing stay -1."""
    rows = logits.shape[0]
    if vendor.has("xspeedgate_ops.topk_per_row"):
        found = torch.full((rows, topk), -1, dtype=torch.int32, device=logits.device)
        stop = normalise.int32(visible)
        vendor.speed_ops().topk_per_row(
            logits, found, rows, logits.stride(0), logits.stride(1), topk, torch.zeros_like(stop), stop, None, None
        )
    else:
        if topk != FAST_TOPK.value:
            raise ContractError(_OP, "topk", f"{FAST_TOPK.value} (this build has only fast_topkv2)", str(topk))
        found = vendor.kernel_module().fast_topkv2(logits, normalise.int32(visible), topk)
    return torch.where((found >= 0) & (found < visible.unsqueeze(1)), found, -1)
