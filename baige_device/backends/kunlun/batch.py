"""A ragged batch as the vendor's kernels want it: lengths on the host and on the device, tokens with their requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise

__all__ = ["Batch", "read_batch"]


@dataclass(frozen=True)
class Batch:
    """Lengths known to the host. `tokens` excludes graph padding behind the last request."""

    q_starts: list[int]
    seq_lens: list[int]
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.q_starts[-1]

    @cached_property
    def kv_starts(self) -> list[int]:
        """Cumulative sequence lengths `[B+1]`: all tokens of each request, the cached prefix included."""
        starts = [0]
        for length in self.seq_lens:
            starts.append(starts[-1] + length)
        return starts

    @property
    def longest(self) -> int:
        return max(self.seq_lens, default=0)

    @property
    def most_queries(self) -> int:
        return max((stop - start for start, stop in zip(self.q_starts, self.q_starts[1:], strict=False)), default=0)

    @cached_property
    def request_of_token(self) -> Tensor:
        """int64 `[tokens]` on the host."""
        counts = torch.tensor(self.q_starts, dtype=torch.int64, device="cpu").diff()
        return torch.repeat_interleave(torch.arange(len(self.seq_lens), device="cpu"), counts)

    @cached_property
    def last_position(self) -> Tensor:
        """int64 `[tokens]` on the host: each query's position in its request; below 0 for a query without a token."""
        ends = torch.tensor(self.q_starts[1:], dtype=torch.int64, device="cpu")
        lens = torch.tensor(self.seq_lens, dtype=torch.int64, device="cpu")
        request = self.request_of_token
        return lens[request] - ends[request] + torch.arange(self.tokens, device="cpu")

    def seen(self, tokens: int) -> Tensor:
        """bool `[tokens]` on the device: rows that own a position; graph padding and empty requests do not."""
        seen = torch.zeros(tokens, dtype=torch.bool, device="cpu")
        seen[: self.tokens] = self.last_position >= 0
        return seen.to(self.device)

    def key_tokens(self) -> tuple[Tensor, Tensor]:
        """int64 `[sum of lengths]` twice, on the device: request and position of every key, request by request."""
        lens = torch.tensor(self.seq_lens, dtype=torch.int64, device="cpu")
        request = torch.repeat_interleave(torch.arange(len(self.seq_lens), device="cpu"), lens)
        starts = torch.tensor(self.kv_starts, dtype=torch.int64, device="cpu")
        position = torch.arange(self.kv_starts[-1], device="cpu") - starts[request]
        return request.to(self.device), position.to(self.device)


def read_batch(q_starts: Tensor, seq_lens: Tensor) -> Batch:
    """Read the lengths; a sync unless the engine gave host twins."""
    starts: list[int] = normalise.host_copy(q_starts).tolist()
    lens: list[int] = normalise.host_copy(seq_lens).tolist()
    return Batch(starts, lens, seq_lens.device)
