"""Activation of a worker process: what the model needs, one frozen table, equal on all ranks."""

from __future__ import annotations

from typing import Any

from baige_device.activation import Activation, activate
from baige_device.engines.sglang.compat import cpu_group, engine_label, host_rank
from baige_device.engines.sglang.needs import model_needs, serves_hisparse
from baige_device.settings import load_settings

__all__ = ["activate_worker"]

_checked: Activation | None = None


def activate_worker(runner: Any, *, attention: bool, experts: bool) -> Activation:
    """Activate this process for the model of a `ModelRunner`; the first call compares ranks and serves the metrics.

    `attention` and `experts` say which of them run through our ops.

    Raises:
        OpUnsupported: the chip does not serve the model. RankMismatch: the workers differ.
    """
    global _checked
    settings = load_settings()
    needs = model_needs(runner, attention=attention, experts=experts)
    optimizations = ["hisparse"] if serves_hisparse(runner) else []
    activation = activate(settings, needs=needs, engine=engine_label(), optimizations=optimizations)
    for need in needs:
        activation.require(need)
    if _checked is not activation:
        group = cpu_group()
        if group.size() > 1:
            activation.verify_ranks(group)
        if settings.metrics_port:
            from baige_device.metrics import serve

            serve(activation, host_rank())
        _checked = activation
    return activation
