"""The routed scaling factor is applied exactly once, by whoever applies it in the installed SGLang."""

from __future__ import annotations

from baige_device.engines.sglang.moe_scale import BLOCKS
from tests.engines.sglang.engine import run
from tests.engines.tiny_models import model_path


def test_known_blocks_multiply_once_and_others_are_refused() -> None:
    model = str(model_path("deepseek_v3"))
    report = run("moe_blocks", model, BAIGE_BACKEND="reference", BAIGE_CHECKS="values").answer
    unbound, unknown = report.pop("refused")
    assert "expected a layer of the loaded model" in unbound
    assert unknown.startswith("sglang: mlp: routed_scaling_factor 2.5: expected a block of which it is known")
    assert set(report) == set(BLOCKS)
    # Without the factor, or with it twice, the error is about one half or more.
    assert {path: errors for path, errors in report.items() if max(errors) > 1e-5} == {}
