"""The portable kernels on CPU: Triton runs them in its interpreter, which it must know before a kernel is defined."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed; run these tests in the vLLM environment")
