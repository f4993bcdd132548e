"""`kv_write`: the vendor's cache kernels for contiguous 16-bit caches, an indexed device write for other layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from baige_device.backends.kunlun import normalise, rows, vendor
from baige_device.backends.kunlun.limits import ATTENTION_HEAD_SIZES, MLA_HEAD_SIZE, MLA_VALUE_SIZE

__all__ = ["HALF", "kv_write", "kv_write_portable"]

HALF = (torch.bfloat16, torch.float16)


def kv_write(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See the contract; no float8.

    Rows of 576 go through `concat_and_cache_mla`, those of a dense head size through `reshape_and_cache_flash`. A
    strided cache, another width or a conversion of dtype is an indexed write of fixed shape. No sync in any case.
    """
    tokens, groups, width = values.shape
    if 0 in values.shape or cache.numel() == 0:
        return
    named = slots[:tokens]
    if cache.dtype not in HALF or values.dtype != cache.dtype or not cache.is_contiguous():
        rows.put_rows(cache, named, values)
    elif groups == 1 and width == MLA_HEAD_SIZE.value:
        _write_latent(values.squeeze(1), cache.squeeze(2), named)
    elif width in ATTENTION_HEAD_SIZES:
        _write_heads(values, cache, named)
    else:
        rows.put_rows(cache, named, values)


def _write_latent(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    latent, rope = values[:, : MLA_VALUE_SIZE.value], values[:, MLA_VALUE_SIZE.value :]
    vendor.kernel_module().concat_and_cache_mla(
        normalise.dense(latent), normalise.dense(rope), normalise.int32(slots), cache
    )


def _write_heads(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """The kernel writes a pair of caches; giving it the same one twice writes the same rows twice."""
    new = normalise.dense(values)
    vendor.kernel_module().reshape_and_cache_flash(new, new, cache, cache, normalise.int32(slots), BLHD_LAYOUT=True)


def kv_write_portable(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See the contract; no float8. Always the indexed write; fixed shapes, no sync, any strides."""
    if values.numel() and cache.numel():
        rows.put_rows(cache, slots[: values.shape[0]], values)
