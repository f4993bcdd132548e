"""Compile the portable kernels for a GPU that is not there, and read registers, spills and shared memory.

The launchers run on CPU tensors; Triton is told that the target is Hopper, and every launch stops after compilation.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

__all__ = ["Compiled", "compiling", "main"]


@dataclass(frozen=True)
class Compiled:
    """Resources of one compiled kernel."""

    name: str
    registers: int
    spilled_bytes: int
    """Stack frame of a thread."""
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
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run(
            [str(tool), "-res-usage", str(binary)], capture_output=True, text=True, check=True
        ).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert used, report
    return Compiled(kernel.metadata.name, int(used[1]), int(used[2]), int(kernel.metadata.shared), kernel.asm["ptx"])


def main() -> None:
    """Compile the kernels that matter on Hopper and print their resources as one line of JSON."""
    from baige_device.backends.portable import sparse_fp8
    from baige_device.backends.portable.attend_paged import attend_paged
    from baige_device.backends.portable.index_topk import score_keys
    from baige_device.backends.portable.sparse_attention import sparse_attention

    sparse_fp8.has_native_e4m3 = lambda device: True  # type: ignore[assignment]
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    lists = torch.zeros(4, 1, 2048, dtype=torch.int32)
    latent = torch.zeros(4, 128, 576, dtype=bf16)
    table, starts = torch.zeros(1, 100, dtype=torch.int32), torch.tensor([0, 4])
    lengths, gates = torch.tensor([1600]), torch.zeros(4, 64)
    calls = {
        "decode_fp8": lambda: sparse_attention(
            latent,
            torch.zeros(512, 1, 656, dtype=torch.uint8),
            None,
            lists,
            scale=0.1,
            v_dim=512,
            kv_format="fp8_ds_mla",
        ),
        "decode_fp8_few_heads": lambda: sparse_attention(
            latent[:, :32],
            torch.zeros(512, 1, 656, dtype=torch.uint8),
            None,
            lists,
            scale=0.1,
            v_dim=512,
            kv_format="fp8_ds_mla",
        ),
        "prefill_bf16": lambda: sparse_attention(
            latent, torch.zeros(512, 1, 576, dtype=bf16), None, lists, scale=0.1, v_dim=512
        ),
        "dense_gqa": lambda: attend_paged(
            torch.zeros(400, 32, 128, dtype=bf16),
            torch.zeros(512, 16, 4, 128, dtype=bf16),
            torch.zeros(512, 16, 4, 128, dtype=bf16),
            table,
            torch.tensor([0, 400]),
            lengths,
            scale=0.1,
        ),
        "index_fp8": lambda: score_keys(
            torch.zeros(4, 64, 128, dtype=fp8),
            gates,
            torch.zeros(512, 64, 128, dtype=fp8),
            torch.ones(512, 64),
            table,
            starts,
            lengths,
            torch.zeros(4, 6400),
            0,
        ),
    }
    report = {}
    for name, call in calls.items():
        with compiling(pytest.MonkeyPatch()) as found:
            call()
        report[name] = {
            "registers": found[0].registers,
            "spilled_bytes": found[0].spilled_bytes,
            "shared_bytes": found[0].shared_bytes,
            "wgmma": found[0].count("wgmma.mma_async"),
            "mma": found[0].count("mma.sync"),
            "prefetches": found[0].count("cp.async.cg"),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
