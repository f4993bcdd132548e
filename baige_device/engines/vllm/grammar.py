"""Structured output on a chip without Triton and JIT: the grammar's bitmask applied in plain torch.

Matching and mask filling stay xgrammar's; only its kernel for device logits is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from baige_device.engines.grammar import apply_token_bitmask
from baige_device.engines.vllm.ledger import BITMASK, LEDGER

__all__ = ["mount_grammar"]


def mount_grammar() -> None:
    """Replace the function that the host's `apply_grammar_bitmask` calls. Idempotent."""
    LEDGER.patch(BITMASK, lambda _: _apply)


def _apply(
    logits: Tensor,
    bitmask: Tensor,
    *,
    vocab_size: int | None = None,
    indices: Tensor | Sequence[int] | None = None,
    backend: str = "auto",
) -> None:
    """xgrammar's signature; `vocab_size` leaves padded columns alone."""
    apply_token_bitmask(logits if vocab_size is None else logits[:, :vocab_size], bitmask, indices)
