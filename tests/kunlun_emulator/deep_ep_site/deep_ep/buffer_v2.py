"""The module in which the vendor's port keeps its buffer class."""

from kunlun_emulator.exchange import BufferV2

__all__ = ["BufferV2"]
