"""The conformance kit against the portable tier, kernel by kernel in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed; run these tests in the vLLM environment")

from baige_device.testing import BackendConformance


class TestInterpreted(BackendConformance):
    backend = "interpreted"
    plugin = "tests.unit.portable.plugin:PLUGIN"
    ops = (
        "attend_paged",
        "sparse_attention",
        "merge_attention",
        "index_topk",
        "kv_write",
        "moe_dispatch",
        "moe_expert_ffn",
        "moe_combine",
    )
    ranks = (2,)
