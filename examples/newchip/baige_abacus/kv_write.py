"""`kv_write` on the abacus chip."""

from __future__ import annotations

import torch

from baige_abacus.runtime import run


def kv_write(values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `values` `[T, G, D]` into the slots of `cache` `[P, N, G, D]`; slot -1 writes nothing."""

    def work() -> None:
        named = slots[: values.shape[0]].long()
        live = named >= 0
        named, rows, page_tokens = named[live], values[live], cache.shape[1]
        if cache.dtype == torch.float8_e4m3fn:
            rows = rows.clamp(-448, 448)  # the op saturates; torch's conversion makes NaN of what does not fit
        cache[named // page_tokens, named % page_tokens] = rows.to(cache.dtype)

    if cache.shape[1]:
        run(work)
