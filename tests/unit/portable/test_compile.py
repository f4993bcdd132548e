"""The kernels compile for Hopper without a GPU, use its matrix instructions, and keep their values in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed; run these tests in the vLLM environment")

_LIMITS = {"decode_fp8": 640, "prefill_bf16": 512, "dense_gqa": 0, "index_fp8": 0}
"""Bytes of stack a thread may use. The 512-column tiles fill all 255 registers: Triton 3.6 spills 8 and 84 bytes there,
3.9 some 550 and 440; a wrong tile shape spills kilobytes."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.portable.compile_only"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("kernel", sorted(_LIMITS))
def test_uses_warp_group_products_within_the_registers(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    found = compiled[kernel]
    assert found["wgmma"] > 0
    assert found["spilled_bytes"] <= _LIMITS[kernel]
    assert found["shared_bytes"] <= 227 * 1024
