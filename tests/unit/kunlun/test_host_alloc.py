"""Registered host memory: what happens when the runtime does not let it go."""

from __future__ import annotations

import kunlun_emulator
import pytest

from baige_device.backends.kunlun.host_alloc import host_alloc
from baige_device.errors import HostMemoryError

Chip = kunlun_emulator.STATE.__class__


def test_release_unregisters(chip: Chip) -> None:
    before = dict(chip.registered)
    buffer = host_alloc(4097)
    assert len(chip.registered) == len(before) + 1
    buffer.close()
    assert chip.registered == before


def test_a_failed_release_is_named_and_keeps_the_memory_mapped(chip: Chip) -> None:
    buffer = host_alloc(4097)
    view = buffer.tensor[:4]
    view.fill_(7)
    address = view.data_ptr()
    del chip.registered[address]  # as if somebody else had unregistered it
    with pytest.raises(HostMemoryError, match=rf"release of 4097 bytes: cudaHostUnregister\({address:#x}\).*status 1"):
        buffer.close()
    assert view.tolist() == [7] * 4
    assert buffer.closed
    buffer.close()
