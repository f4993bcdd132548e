"""The kernels compile for Hopper without a GPU, use its matrix instructions, and keep their values in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

_LIMITS = {"decode_fp8": 64, "decode_fp8_few_heads": 384, "prefill_bf16": 64, "dense_gqa": 0, "index_fp8": 0}
"""Bytes of stack a thread may use. The 512-column tiles fill all 255 registers: Triton 3.6 spills nothing but 8 bytes
of the few heads', 3.9 up to 128 there and 24 elsewhere; a wrong tile shape spills kilobytes."""


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
def test_stays_within_registers_and_shared_memory(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    found = compiled[kernel]
    assert found["spilled_bytes"] <= _LIMITS[kernel]
    assert found["shared_bytes"] <= 227 * 1024


@pytest.mark.parametrize("kernel", sorted(_LIMITS.keys() - {"decode_fp8_few_heads"}))
def test_uses_warp_group_products(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    assert compiled[kernel]["wgmma"] > 0


@pytest.mark.parametrize("kernel", ["decode_fp8", "prefill_bf16"])
def test_computes_logits_once(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    """576 / 16 instructions for the logits and 64 / 16 for the values; 76 when both warp groups compute all logits."""
    assert compiled[kernel]["wgmma"] == 40


def test_few_heads_read_rows_once_a_product(compiled: dict[str, dict[str, int]]) -> None:
    """576 / 16 instructions for the logits: one warp group computes all of them."""
    assert compiled["decode_fp8_few_heads"]["wgmma"] == 36
