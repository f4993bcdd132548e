"""Copies between registered host memory and the device, by raw addresses."""

from __future__ import annotations

import ctypes

import torch
from kunlun_emulator.checks import contiguous, dtype, expect, kernel, shape
from kunlun_emulator.state import STATE
from torch import Tensor

__all__ = ["batch_memcpy", "transfer_kv_per_layer_mla"]


@kernel
def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Item i goes from `src + src_indices[i] * item_size` to `dst + dst_indices[i] * item_size`, bytes."""
    op = "transfer_kv_per_layer_mla"
    dtype(op, torch.int64, src_indices=src_indices, dst_indices=dst_indices)
    shape(op, "dst_indices", dst_indices, *src_indices.shape)
    contiguous(op, src_indices=src_indices, dst_indices=dst_indices)
    step = STATE.profile.item_step_bytes
    expect(item_size > 0 and item_size % step == 0, op, f"item_size {item_size} is no multiple of {step}")
    registered = [_registered(src), _registered(dst)]
    expect(any(registered), op, "neither side is registered host memory")
    for source, target in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        for name, tensor, index in (("src", src, source), ("dst", dst, target)):
            stop = tensor.storage_offset() * tensor.element_size() + (index + 1) * item_size
            expect(index >= 0 and stop <= tensor.untyped_storage().nbytes(), op, f"illegal access, {name} item {index}")
        ctypes.memmove(dst.data_ptr() + target * item_size, src.data_ptr() + source * item_size, item_size)


def _registered(tensor: Tensor) -> bool:
    return STATE.is_registered(tensor.data_ptr(), max(1, tensor.numel() * tensor.element_size()))


@kernel
def batch_memcpy(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor) -> None:
    op = "batch_memcpy"
    dtype(op, torch.int64, src_ptrs=src_ptrs, dst_ptrs=dst_ptrs)
    dtype(op, torch.int32, sizes=sizes)
    contiguous(op, src_ptrs=src_ptrs, dst_ptrs=dst_ptrs, sizes=sizes)
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        if size:
            host = STATE.is_registered(source, size) or STATE.is_registered(target, size)
            expect(host, op, "neither side is registered host memory")
            expect(STATE.profile.memcpy_takes_host, op, "this build takes device addresses only")
            ctypes.memmove(target, source, size)
