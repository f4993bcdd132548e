"""One step's requests as our ops take them, from SGLang's `ForwardBatch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.engines.sglang.compat import write_slots
from baige_device.errors import MountError

__all__ = ["RaggedBatch", "make_batch"]


@dataclass(frozen=True)
class RaggedBatch:
    """B requests with T new tokens. Built once a step, used by every layer."""

    block_table: Tensor
    """int32 `[B, M]`: pages of `page_tokens` tokens."""
    q_starts: Tensor
    """int32 `[B+1]`."""
    seq_lens: Tensor
    """`[B]`; 0 for a padded request."""
    slots: Tensor
    """`[T']`: where the new tokens' rows go, -1 for padding."""
    requests: Tensor
    """int64 `[T']`: the request of each token, 0 for padding."""
    latent_slots: Tensor
    """The same for latent rows of MLA; under HiSparse these are rows of the device pool, and `slots` logical ones."""
    page_tokens: int
    max_query_tokens: int
    max_seq_tokens: int

    def rows(self, positions: Tensor) -> Tensor:
        """Cache rows `[T, K]` of positions within the requests; -1 stays -1."""
        known = positions.clamp_min(0)
        requests = self.requests[: known.shape[0], None]
        pages = self.block_table[requests, known // self.page_tokens]
        rows = pages * self.page_tokens + known % self.page_tokens
        return rows.masked_fill_(positions < 0, -1)


def make_batch(forward_batch: Any, req_to_token: Tensor, page_tokens: int) -> RaggedBatch:
    """Translate a decode, extend or mixed batch.

    Raises:
        MountError: a speculative batch, whose tree masks the ops do not know.
    """
    mode = forward_batch.forward_mode
    if forward_batch.spec_info is not None or mode.is_target_verify():
        raise MountError(
            "sglang: attention backend baige: speculative decoding: expected none, got a batch with spec_info"
        )
    seq_lens = forward_batch.seq_lens
    requests = seq_lens.shape[0]
    host_lens = seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
    max_seq = int(host_lens.max()) if requests else 0
    if mode.is_decode():
        q_lens, max_query = torch.ones_like(seq_lens, dtype=torch.int32), min(requests, 1)
        q_starts = torch.arange(requests + 1, dtype=torch.int32, device=seq_lens.device)
        tokens = requests
    else:
        q_lens = forward_batch.extend_seq_lens
        host_q_lens = forward_batch.extend_seq_lens_cpu
        tokens, max_query = sum(host_q_lens), max(host_q_lens, default=0)
        q_starts = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
    pages = req_to_token[:, :max_seq:page_tokens][forward_batch.req_pool_indices]
    owners = torch.arange(requests, device=seq_lens.device).repeat_interleave(q_lens, output_size=tokens)
    padding = max(forward_batch.out_cache_loc.shape[0] - tokens, 0)
    slots = write_slots(forward_batch.out_cache_loc)
    return RaggedBatch(
        block_table=pages // page_tokens if page_tokens > 1 else pages,
        q_starts=q_starts,
        seq_lens=seq_lens,
        slots=slots,
        latent_slots=slots,
        requests=torch.nn.functional.pad(owners, (0, padding)),
        page_tokens=page_tokens,
        max_query_tokens=max_query,
        max_seq_tokens=max_seq,
    )
