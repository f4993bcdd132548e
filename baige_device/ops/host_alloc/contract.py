"""Contract of `host_alloc`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from baige_device.errors import ContractError
from baige_device.ops.base import Cost, OpContract

__all__ = ["CONTRACT", "HostBuffer", "host_alloc"]

_OP = "host_alloc"


@dataclass
class HostBuffer:
    """Host memory owned by one user. Close it, or use it as a context manager; closing twice is fine."""

    tensor: Tensor
    """uint8 `[num_bytes]` on the CPU, zero-filled. Its address is the one that gather and scatter are given."""
    kind: Literal["pinned", "managed", "pageable"]
    """`pinned`: registered with the driver. `managed`: the driver's, kept on the host; made for scattered rows, while
    the driver's bulk copies of it may be slow. `pageable`: only from backends whose device reads ordinary host memory
    (the reference)."""
    release: Callable[[], None] = field(default=lambda: None, repr=False)
    closed: bool = False

    def close(self) -> None:
        """Unregister and free. Transfers that still use the memory must have completed; views of it become invalid."""
        if not self.closed:
            self.closed = True
            self.tensor = self.tensor.new_empty(0)
            self.release()

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def host_alloc(num_bytes: int) -> HostBuffer:  # type: ignore[empty-body]
    """Allocate host memory that the device of this process can read and write directly.

    The size is exact: no rounding to a power of two. Limits (cgroup, memlock, machine) are checked before anything is
    allocated, and a failure leaves nothing behind.

    Args:
        num_bytes: size, >= 0. Zero gives an empty, closable buffer.
    Returns:
        `HostBuffer`: zero-filled uint8 `[num_bytes]`, aligned to 4096 bytes or better.
    Raises:
        ContractError: negative size. HostMemoryError: not to be had; states asked bytes, the limit and the remedy.
    Cost: one page fault and one registration a page; call it at start-up, not in a step.
    """


def check(values: bool, num_bytes: int) -> None:
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 0:
        raise ContractError(_OP, "num_bytes", "an int >= 0", repr(num_bytes))


def cost(num_bytes: int) -> Cost:
    """Bytes of memory that are zero-filled."""
    return Cost(num_bytes)


CONTRACT = OpContract(_OP, "gather", host_alloc, check, cost)
