"""Contract of `fp8_all_gather`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import (
    Cost,
    OpContract,
    check_dtype,
    check_inner_contiguous,
    check_same_device,
    check_shape,
    group_rank_and_size,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CONTRACT", "GatherHandle", "fp8_all_gather"]

_OP = "fp8_all_gather"


class GatherHandle(Protocol):
    """An all-gather in flight."""

    def wait(self) -> Tensor:
        """Make the current stream wait for the gather and return the image `[sum(shard_bytes)]`. May be repeated."""


def fp8_all_gather(  # type: ignore[empty-body]
    shard: Tensor,
    shard_bytes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
) -> GatherHandle:
    """Start gathering the byte images of all ranks' weight shards, in rank order, and return at once.

    The op moves bytes: what they mean (fp8 payload and scales of one layer, int8, bf16) is laid out by
    `ops/fp8_all_gather/image.py`, whose shards are split on block edges so that scales travel with their block rows.

    Args:
        shard: uint8 `[shard_bytes[rank]]`, dense. It must stay unchanged until `wait` has returned.
        shard_bytes: the size of every rank's shard, equal on all ranks and known since load; sizes may differ and be 0.
        group: process group; None is the default group, or one rank when torch.distributed is not initialised.
        out: uint8 `[sum(shard_bytes)]` fixed buffer; it must not be read between this call and `wait`. None allocates.
    Returns:
        `GatherHandle`; `wait()` gives the image. An empty shard still takes part.
    Raises:
        ContractError: sizes that do not fit shard, group or `out`.
    Cost: (N-1)/N of the image crosses the rank's link. Runs beside the current stream where the chip can.
    """


def check(
    values: bool,
    shard: Tensor,
    shard_bytes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
) -> None:
    rank, size = group_rank_and_size(group)
    if len(shard_bytes) != size or min(shard_bytes) < 0:
        raise ContractError(_OP, "shard_bytes", f"{size} sizes >= 0, one a rank", str(list(shard_bytes)))
    check_dtype(_OP, "shard", shard, (torch.uint8,))
    check_shape(_OP, "shard", shard, (shard_bytes[rank],))
    check_inner_contiguous(_OP, "shard", shard)
    if out is not None:
        check_dtype(_OP, "out", out, (torch.uint8,))
        check_shape(_OP, "out", out, (sum(shard_bytes),))
        check_inner_contiguous(_OP, "out", out)
        check_same_device(_OP, shard=shard, out=out)


def cost(
    shard: Tensor,
    shard_bytes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
) -> Cost:
    """Bytes that this rank receives."""
    return Cost(sum(shard_bytes) - shard.numel())


CONTRACT = OpContract(
    _OP,
    "weights",
    fp8_all_gather,
    check,
    cost,
    "fp8_all_gather(Tensor shard, int[] shard_bytes, *, str group_name='') -> Tensor",
)
