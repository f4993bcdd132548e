"""Pinned host memory: size, zeros, release, and limits."""

from __future__ import annotations

import pytest
import torch

from baige_device.backends.cuda import host_memory
from baige_device.backends.cuda.driver import device_address
from baige_device.errors import HostMemoryError
from tests.device.gpu import needs_gpu

pytestmark = [needs_gpu, pytest.mark.device]


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, (2 << 20) + 1, (64 << 20) + 12345])
def test_size_is_exact_and_all_of_it_is_mapped(num_bytes: int) -> None:
    buffer = host_memory.host_alloc(num_bytes)
    address = buffer.tensor.data_ptr()
    assert buffer.tensor.shape == (num_bytes,)
    assert address % 4096 == 0
    assert not buffer.tensor.any()
    assert device_address(address) is not None
    assert device_address(address + num_bytes - 1) is not None
    buffer.close()
    buffer.close()
    assert device_address(address) is None


def test_chunks_are_contiguous_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 4 << 20)
    with host_memory.host_alloc((18 << 20) + 7) as buffer:
        first = device_address(buffer.tensor.data_ptr())
        last = device_address(buffer.tensor.data_ptr() + buffer.tensor.numel() - 1)
        assert first is not None
        assert last is not None
        assert last - first == buffer.tensor.numel() - 1


def test_a_failing_chunk_undoes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 4 << 20)
    register, seen = host_memory.register_host, []

    def failing(address: int, num_bytes: int) -> str:
        seen.append(address)
        return register(address, num_bytes) if len(seen) < 3 else "planted failure"

    monkeypatch.setattr(host_memory, "register_host", failing)
    with pytest.raises(HostMemoryError, match=r"8388608 bytes were pinned.*planted failure.*RLIMIT_MEMLOCK"):
        host_memory.host_alloc(16 << 20)
    assert all(device_address(address) is None for address in seen)


def test_more_than_the_machine_has_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(HostMemoryError, match=f"asked for {1 << 50} bytes"):
        host_memory.host_alloc(1 << 50)


def test_empty_buffer() -> None:
    with host_memory.host_alloc(0) as buffer:
        assert buffer.tensor.shape == (0,)
        assert isinstance(buffer.tensor, torch.Tensor)
