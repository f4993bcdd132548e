"""Launches that are repeated: the same kernels with the same parameters, and only while nothing changed."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.backends.cuda import driver, gather
from baige_device.engines.vllm.cuda_replay import Repeated, may_repeat
from baige_device.errors import BackendError
from baige_device.ops.uva_sparse_gather.contract import CONTRACT
from baige_device.registry.bind import bind


class Params(ctypes.Structure):
    _fields_ = [("value", ctypes.c_int)]


class Device:
    """A kernel whose launch notes what the struct holds, called through C as the driver's is."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.status = 0
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 11)
        self.entry = entry(self.launched)
        self.kernel: Any = object.__new__(driver.Kernel)
        self.kernel._function, self.kernel._early, self.kernel._launch = None, False, self.entry

    def launched(self, *arguments: int) -> int:
        pointers = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.POINTER(Params)))
        self.seen.append((arguments[8], pointers[0].contents.value))
        return self.status


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(driver, "context", lambda number: contextlib.nullcontext())
    monkeypatch.setattr(driver, "_explain", lambda status: f"status {status}")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: 7, raising=False)
    return Device()


def test_a_pass_is_made_once_and_repeated_while_its_key_stays(device: Device) -> None:
    runs: list[int] = []

    def run(value: int) -> None:
        runs.append(value)
        for step in range(2):
            device.kernel.launch(1, 32, 7, Params(10 * value + step))

    repeated = Repeated(2)
    for value, key in ((1, (5, 6)), (2, (5, 6)), (3, (5, 8)), (4, (5, 8))):
        repeated(key, 0, lambda value=value: run(value))  # type: ignore[misc]
    assert runs == [1, 3]
    assert device.seen == [(7, n) for n in (10, 11, 10, 11, 30, 31, 30, 31)]


def test_a_pass_with_other_launches_is_never_repeated(device: Device) -> None:
    repeated, runs = Repeated(2), []
    for _ in range(3):
        repeated((1,), 0, lambda: runs.append(device.kernel.launch(1, 32, 7, Params(1))))
    assert len(runs) == len(device.seen) == 3


def test_a_pass_that_failed_is_made_again(device: Device) -> None:
    repeated, runs = Repeated(1), []

    def run() -> None:
        runs.append(1)
        device.kernel.launch(1, 32, 7, Params(1))

    device.status = 700
    with pytest.raises(BackendError, match="status 700"):
        repeated((1,), 0, run)
    device.status = 0
    repeated((1,), 0, run)
    device.status = 700
    with pytest.raises(BackendError, match="status 700"):
        repeated((1,), 0, run)
    assert len(runs) == 2
    assert driver._recorder.tape is None


@pytest.mark.parametrize(("check", "repeats"), [(False, True), (True, False)])
def test_only_our_kernels_without_checks_are_repeated(check: bool, repeats: bool) -> None:
    bound, _ = bind(CONTRACT, gather.uva_sparse_gather, check=check)
    ops = SimpleNamespace(uva_sparse_gather=bound)
    assert may_repeat(ops, "uva_sparse_gather") is repeats
    assert not may_repeat(ops, "uva_sparse_gather", entries=5000)
    other, _ = bind(CONTRACT, lambda *a, **k: None, check=check)
    assert not may_repeat(SimpleNamespace(uva_sparse_gather=other), "uva_sparse_gather")
