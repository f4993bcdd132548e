"""Managed host memory: stays on the host, mapped for the device, given back; registered where it cannot be had."""

from __future__ import annotations

import ctypes

import pytest
import torch

from baige_device.backends.cuda import driver, host_memory, managed_memory
from baige_device.backends.cuda.gather import uva_sparse_gather, uva_sparse_scatter
from baige_device.errors import BackendError, HostMemoryError
from tests.device.gpu import captured, needs_gpu

pytestmark = [needs_gpu, pytest.mark.device]


_PREFERRED_LOCATION, _ACCESSED_BY, _HOST = 2, 3, -1


def range_attribute(address: int, num_bytes: int, attribute: int) -> int:
    """What the driver was advised of a range of managed memory."""
    found = ctypes.c_int()
    range_bytes = ctypes.c_size_t(num_bytes)
    library = ctypes.CDLL("libcuda.so.1")
    status = library.cuMemRangeGetAttribute(
        ctypes.byref(found), ctypes.c_size_t(4), attribute, ctypes.c_uint64(address), range_bytes
    )
    assert status == 0
    return found.value


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, (2 << 20) + 1, (64 << 20) + 12345])
def test_size_is_exact_and_all_of_it_stays_on_the_host_and_is_mapped(num_bytes: int) -> None:
    buffer = managed_memory.host_alloc(num_bytes)
    address = buffer.tensor.data_ptr()
    assert buffer.kind == "managed"
    assert buffer.tensor.shape == (num_bytes,)
    assert not buffer.tensor.any()
    assert driver.device_address(address + num_bytes - 1) == address + num_bytes - 1
    assert range_attribute(address, num_bytes, _PREFERRED_LOCATION) == _HOST
    assert range_attribute(address, num_bytes, _ACCESSED_BY) == torch.cuda.current_device()
    assert managed_memory.has_large_pages(address)
    assert not managed_memory.has_large_pages(address - 1)
    buffer.close()
    buffer.close()
    assert not managed_memory.has_large_pages(address)


def test_the_device_takes_no_memory_of_its_own_for_it() -> None:
    pages = 512
    device = torch.ones(pages, 4096, dtype=torch.uint8, device="cuda")
    places, rows = (torch.arange(0, pages * step, step, device="cuda") for step in (1, (2 << 20) // 4096))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with managed_memory.host_alloc(pages * (2 << 20)) as buffer:
        host = buffer.tensor.view(-1, 4096)
        for _ in range(4):  # a row of every page
            uva_sparse_scatter(device, host, places, rows)
            uva_sparse_gather(host, device, rows, places)
        torch.cuda.synchronize()
        taken_bytes = before - torch.cuda.mem_get_info()[0]
        assert host[rows.cpu()].all()
        assert taken_bytes < 64 << 20


def test_host_and_device_see_each_other_between_replays() -> None:
    with managed_memory.host_alloc(8 << 20) as buffer:
        host = buffer.tensor[: 656 * 4096].view(4096, 656)
        device = torch.zeros(4096, 656, dtype=torch.uint8, device="cuda")
        rows = torch.randperm(4096, device="cuda")
        graph = captured(lambda: uva_sparse_gather(host, device, rows, rows))
        for value in (7, 9):
            host.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert (device == value).all()


def test_a_driver_without_concurrent_access_gets_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_memory, "managed_is_concurrent", lambda device: False)
    with managed_memory.host_alloc(4097) as buffer:
        assert buffer.kind == "pinned"


def test_a_refused_mapping_gives_registered_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed: list[int] = []

    def refuse(address: int, num_bytes: int, device: int) -> None:
        raise BackendError("cuda: planted refusal")

    free = driver.free_managed
    monkeypatch.setattr(managed_memory, "map_managed", refuse)
    monkeypatch.setattr(managed_memory, "free_managed", lambda address: (freed.append(address), free(address)))
    with managed_memory.host_alloc(4097) as buffer:
        assert buffer.kind == "pinned"
    assert len(freed) == 1
    assert "planted refusal; registered memory" in caplog.text


def test_pages_that_the_kernel_does_not_bring_in_come_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "populate", lambda address, num_bytes: False)
    with managed_memory.host_alloc((4 << 20) + 1) as buffer:
        assert buffer.kind == "managed"
        assert not buffer.tensor.any()


def test_more_than_the_machine_has_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(HostMemoryError, match="asked for"):
        managed_memory.host_alloc(1 << 50)
    assert not managed_memory._live
