"""Benchmark scripts that must run where nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_vllm_packer_needs_no_installed_package(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "benchmarks" / "pack_vllm.py"), "--help"]  # the bare interpreter
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--parts" in done.stdout
