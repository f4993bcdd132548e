"""The planner's arithmetic (A19: the setting is per node and split over ranks)."""

from __future__ import annotations

import pytest

from baige_device.errors import SettingsError
from baige_device.optimizations.hisparse.plan import HiSparseFacts, plan_hisparse

V32 = HiSparseFacts(
    num_layers=61,
    row_bytes=656,
    index_row_bytes=132,
    topk=2048,
    context_tokens=60_000,
    device_kv_bytes=60 << 30,
    host_gib_per_node=1600,
    local_ranks=8,
)


def test_deepseek_v32_at_60k() -> None:
    plan = plan_hisparse(V32)
    assert plan.hot_tokens == 4096
    assert plan.host_tokens == (200 << 30) // (61 * 656)
    assert plan.batch_without == (60 << 30) // (60_000 * 61 * 788)
    assert plan.batch_device == (60 << 30) // (61 * (4096 * 656 + 60_000 * 132))
    assert plan.batch_with == min(plan.batch_device, plan.host_tokens // 60_000)
    assert plan.pays
    assert "1600 GiB a node / 8 ranks = 200.0 GiB a rank" in plan.explain()


def test_short_contexts_do_not_pay() -> None:
    from dataclasses import replace

    plan = plan_hisparse(replace(V32, context_tokens=2000))
    assert plan.batch_device == plan.batch_without
    assert not plan.pays


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hit_rate": 1.5}, "hit_rate: expected 0 to 1"),
        ({"local_ranks": 0}, "local_ranks: expected >= 1"),
        ({"host_gib_per_node": 0}, "expected positive"),
    ],
)
def test_bad_facts(change: dict[str, float], message: str) -> None:
    from dataclasses import replace

    with pytest.raises(SettingsError, match=message):
        plan_hisparse(replace(V32, **change))  # type: ignore[arg-type]


def test_a_hot_buffer_below_the_topk_is_refused() -> None:
    with pytest.raises(SettingsError, match="hot_tokens: expected >= topk = 2048, got 1024"):
        plan_hisparse(V32, hot_tokens=1024)
