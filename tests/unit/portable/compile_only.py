"""Compile the portable kernels for a GPU that is not there, and read registers, spills and shared memory.

The launchers run on CPU tensors; Triton is told that the target is Hopper, and every launch stops after compilation.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

__all__ = ["Compiled", "compiling"]


@dataclass(frozen=True)
class Compiled:
    """Resources of one compiled kernel."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        """How often an instruction stands in the PTX."""
        return len(re.findall(re.escape(instruction), self.ptx))


class _AbsentHopper:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def compiling(monkeypatch: Any) -> Iterator[list[Compiled]]:
    """Within it every launch compiles its kernel and appends the result to the list; nothing runs."""
    found: list[Compiled] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_resources(kernel))

    monkeypatch.setattr(JITFunction, "run", run)
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_AbsentHopper())
    try:
        yield found
    finally:
        triton.runtime.driver._active = before
        monkeypatch.undo()


def _resources(kernel: Any) -> Compiled:
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        arch = re.search(r"\.target (sm_\w+)", ptx)
        assert arch
        report = subprocess.run(
            [str(ptxas), "-v", f"--gpu-name={arch[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores", report)
    assert registers, report
    return Compiled(
        kernel.metadata.name,
        int(registers[1]),
        int(spills[1]) if spills else 0,
        int(kernel.metadata.shared),
        ptx,
    )
