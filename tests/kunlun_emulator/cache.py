"""Kernels that write new rows into paged caches."""

from __future__ import annotations

import torch
from kunlun_emulator.checks import contiguous, dtype, expect, kernel, shape
from kunlun_emulator.state import STATE
from torch import Tensor

__all__ = ["concat_and_cache_mla", "reshape_and_cache_flash"]

_HALF = (torch.bfloat16, torch.float16)


@kernel
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    op = "concat_and_cache_mla"
    tokens = kv_c.shape[0]
    shape(op, "kv_c", kv_c, -1, 512)
    shape(op, "k_pe", k_pe, tokens, 64)
    shape(op, "slot_mapping", slot_mapping, tokens)
    shape(op, "kv_cache", kv_cache, -1, -1, 576)
    dtype(op, _HALF, kv_cache=kv_cache)
    dtype(op, kv_cache.dtype, kv_c=kv_c, k_pe=k_pe)
    dtype(op, torch.int32, slot_mapping=slot_mapping)
    contiguous(op, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping, kv_cache=kv_cache)
    flat = kv_cache.view(-1, 576)
    for token, slot in enumerate(slot_mapping.tolist()):
        expect(slot < flat.shape[0], op, f"slot {slot} behind the cache")
        if slot >= 0:
            flat[slot, :512], flat[slot, 512:] = kv_c[token], k_pe[token]


@kernel
def reshape_and_cache_flash(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, BLHD_LAYOUT: bool = False
) -> None:
    """Pages `[tokens, heads, columns]` with BLHD_LAYOUT, else `[heads, tokens, columns]`."""
    op = "reshape_and_cache_flash"
    tokens, heads, size = k.shape
    dtype(op, _HALF, k_cache=k_cache, v_cache=v_cache)
    dtype(op, k_cache.dtype, k=k, v=v)
    dtype(op, torch.int32, slot_mapping=slot_mapping)
    shape(op, "slot_mapping", slot_mapping, tokens)
    contiguous(op, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    page = k_cache.shape[1] if BLHD_LAYOUT else k_cache.shape[2]
    wanted = (-1, page, heads, size) if BLHD_LAYOUT else (-1, heads, page, size)
    for name, cache, new in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        shape(op, name, cache, *wanted)
        pages = cache if BLHD_LAYOUT else cache.transpose(1, 2)
        for token, slot in enumerate(slot_mapping.tolist()):
            expect(slot < pages.shape[0] * page, op, f"slot {slot} behind the cache")
            if slot >= 0:
                pages[slot // page, slot % page] = new[token]
            elif not STATE.profile.flash_skips_negative:
                pages[0, 0] = new[token]
