"""How a step's mixed batch is divided: tokens that decode from hot buffers, and prompt chunks that read host rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Chunk", "StepPlan", "TokenSet", "plan_step"]


@dataclass(frozen=True)
class TokenSet:
    """Some tokens of a batch."""

    index: Tensor | None
    """int64 `[t]`: which tokens; None is all of them."""
    states: Tensor
    """int32 `[t]`: the hot row of each token's request, -1 padding."""
    positions: Tensor
    """int64 `[t]`: the token's position within its request."""

    def of(self, values: Tensor) -> Tensor:
        """Their part of a `[T, ...]` tensor."""
        return values if self.index is None else values[self.index]


@dataclass(frozen=True)
class Chunk:
    """A request's prompt tokens of this step."""

    tokens: slice
    request: int
    """Row in the batch."""
    before: int
    """Tokens of the request that earlier steps, or a prefix cache, have brought to the host."""


@dataclass(frozen=True)
class StepPlan:
    """What each layer does with a batch."""

    decode: TokenSet | None
    prompt: TokenSet | None
    chunks: tuple[Chunk, ...]


def plan_step(
    states: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    starts: Sequence[int],
    contexts: Sequence[int],
    limit: int,
) -> StepPlan:
    """Divide a ragged batch of B requests; a request with at most `limit` tokens decodes, others are prompt chunks.

    Args:
        states: int32 `[B]` hot rows. query_start_loc: int32 `[B+1]`. seq_lens: int32 `[B]`, tokens of each request
            including this step's. All on the device.
        starts, contexts: `query_start_loc` and `seq_lens` on the host, so that nothing synchronises.
        limit: tokens of one request whose top-k lists together fit a hot buffer.
    """
    lengths = [after - begin for begin, after in pairwise(starts)]
    total = starts[-1]
    device = states.device
    requests = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), query_start_loc.diff().long(), output_size=total
    )
    offsets = torch.arange(total, device=device) - query_start_loc[:-1].long()[requests]
    before = seq_lens.long() - query_start_loc.diff().long()
    everything = TokenSet(None, states[requests], before[requests] + offsets)
    chunks = tuple(
        Chunk(slice(starts[row], starts[row + 1]), row, contexts[row] - length)
        for row, length in enumerate(lengths)
        if length > limit
    )
    if not chunks:
        return StepPlan(everything if total else None, None, ())
    prompt = [token for chunk in chunks for token in range(chunk.tokens.start, chunk.tokens.stop)]
    if len(prompt) == total:
        return StepPlan(None, everything, chunks)
    decoding = sorted(set(range(total)).difference(prompt))
    return StepPlan(_subset(everything, decoding), _subset(everything, prompt), chunks)


def _subset(everything: TokenSet, tokens: list[int]) -> TokenSet:
    index = torch.tensor(tokens, device=everything.states.device)
    return TokenSet(index, everything.states[index], everything.positions[index])
