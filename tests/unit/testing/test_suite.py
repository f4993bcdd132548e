"""What a vendor sees in pytest: a test per case, refusals as skips with a reason, failures with the seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
VENDOR_FILE = """
from baige_device.testing import BackendConformance


class TestAcme(BackendConformance):
    backend = "acme"
    plugin = "tests.unit.testing.plugins:partial_backend"
    ops = ("attend_paged", "index_topk", "host_alloc")
    skip = {"attend_paged/window-*": "no window before firmware 2.1"}
    seed = 424242
"""


def test_a_vendor_file_run_by_plain_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_acme.py").write_text(VENDOR_FILE)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    flat = " ".join(done.stdout.split())
    assert "no window before firmware 2.1" in flat
    assert "refused: acme tuned: " in flat
    assert "absent: acme offers no host_alloc" in flat
    assert "index_topk/mixed-bfloat16 (tuned tier): BackendError" in flat
    assert "No module named 'baige_device.nowhere'" in flat
    assert "seed 424242" in flat
    assert "attend_paged/mixed-bfloat16" not in flat, "a passing case is no skip and no failure"
