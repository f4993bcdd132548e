"""The portable kernels on CPU: Triton runs them in its interpreter, which it must know before a kernel is defined."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
