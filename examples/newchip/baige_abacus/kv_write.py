"""`kv_write` on the abacus chip."""

from __future__ import annotations

import torch

from baige_abacus.runtime import run


def kv_write(values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `values` `[T, G, D]` into the slots of `cache` `[P, N, G, D]`; slot -1 writes nothing."""

    def work() -> None:
        rows = slots[: values.shape[0]].long()
        live = rows >= 0
        rows, page_tokens = rows[live], cache.shape[1]
        cache[rows // page_tokens, rows % page_tokens] = values[live].to(cache.dtype)

    if cache.shape[1]:
        run(work)
