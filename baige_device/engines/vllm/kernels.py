"""Torch bodies of the Triton kernels on the V1 path, given to the host's kernel registry (from 0.31 on)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baige_device.engines.vllm.compat import slot_mapping_takes_kernel_blocks
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.named_ops import compute_slot_mapping
from baige_device.errors import MountError

__all__ = ["register_kernels"]

_SLOT_MAPPING = "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel"


def register_kernels() -> None:
    """Replace the slot-mapping kernel; once per process."""
    from vllm.triton_utils.dispatcher import register_kernels as register

    if _SLOT_MAPPING in LEDGER.applied:
        return
    kernel = LEDGER.resolve(_SLOT_MAPPING)[2]
    body: Callable[..., None] = _slot_mapping_031 if slot_mapping_takes_kernel_blocks(kernel) else _slot_mapping
    register({_SLOT_MAPPING.replace(":", "."): body})
    LEDGER.note_seam(_SLOT_MAPPING)


def _slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    slot_mapping: Tensor,
    kv_cache_block_size: int,
    total_cp_world_size: int = 1,
    total_cp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    pad_id: int = -1,
    *launch: object,
) -> None:
    """The host launches it by the kernel's parameter order."""
    if total_cp_world_size != 1:
        raise MountError("vllm: decode context parallelism is not served by our platform")
    compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, kv_cache_block_size)
    slot_mapping[num_tokens:max_num_tokens] = pad_id


def _slot_mapping_031(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: Tensor,
    *launch: object,
) -> None:
    _slot_mapping(
        num_tokens,
        max_num_tokens,
        query_start_loc,
        positions,
        block_table,
        block_table_stride,
        slot_mapping,
        block_size,
    )
