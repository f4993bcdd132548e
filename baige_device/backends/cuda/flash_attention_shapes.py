"""Which attention FlashAttention 3 serves, judged without loading it."""

from __future__ import annotations

__all__ = ["ALIGNMENT", "DTYPES", "MLA_SIZES", "head_sizes_fit"]

ALIGNMENT = 8
"""Elements of 16 bits in its 16-byte loads: head sizes and strides are multiples of it."""
DTYPES = ("bfloat16", "float16")
MLA_SIZES = (576, 512)
"""Columns of a key and of its values, where values are the first columns of keys: the latent of DeepSeek-V2 and V3."""
_LARGEST = 256
_UNEQUAL = ((192, 128),)


def head_sizes_fit(head_size: int, v_head_size: int, mla: bool) -> bool:
    """Whether it has a kernel for keys and values of these widths; `mla` says that values lie inside the keys."""
    if mla:
        return (head_size, v_head_size) == MLA_SIZES
    if (head_size, v_head_size) in _UNEQUAL:
        return True
    return head_size == v_head_size and 0 < head_size <= _LARGEST and head_size % ALIGNMENT == 0
