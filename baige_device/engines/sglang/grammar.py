"""Constrained decoding on a chip without Triton and JIT: the grammar's bitmask applied in plain torch.

Matching and mask filling stay xgrammar's; only SGLang's kernel for device logits is replaced.
"""

from __future__ import annotations

from torch import Tensor

from baige_device.engines.grammar import apply_token_bitmask
from baige_device.engines.sglang.ledger import BITMASK_OF_BACKEND, BITMASK_OF_REQUEST, LEDGER

__all__ = ["install"]


def install() -> None:
    """Replace both functions by which SGLang applies a mask of xgrammar's, once."""
    for target in (BITMASK_OF_REQUEST, BITMASK_OF_BACKEND):
        LEDGER.patch(target, lambda _: staticmethod(_apply))


def _apply(logits: Tensor, vocab_mask: Tensor) -> None:
    """One is a method and one a static method upstream; neither uses its owner."""
    apply_token_bitmask(logits, vocab_mask)
