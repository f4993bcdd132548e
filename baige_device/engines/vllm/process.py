"""Activation inside a vLLM process that runs the model: once, with the engine's options and the model's needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from baige_device.activation import Activation, activate
from baige_device.engines.vllm.compat import engine_name, host_rank
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.engines.vllm.needs import attention_needs
from baige_device.engines.vllm.options import engine_settings
from baige_device.errors import MountError
from baige_device.optimizations.active import active_optimizations
from baige_device.registry.offers import Need
from baige_device.registry.table import OpTable

__all__ = ["activate_process", "op_table"]

_active: Activation | None = None


def activate_process(
    vllm_config: Any, needs: Sequence[Need], optimizations: tuple[str, ...] | None = None
) -> Activation:
    """Activate in this process, compare with the other ranks, and serve metrics when asked; later calls return it.

    Called when the process group exists, on every rank at the same point, since the comparison is a collective.
    `optimizations` are those that are on; by default those that our settings switch on.

    Raises:
        OpUnsupported: the model needs what the backend cannot do. RankMismatch: ranks differ.
        MountError: an op that our layers call is switched off.
    """
    global _active
    share_host_log()
    settings = engine_settings(vllm_config)
    if optimizations is None:
        optimizations = active_optimizations(settings)
    active = activate(settings, needs=needs, engine=engine_name(), optimizations=optimizations)
    for need in needs:
        if not active.ops.serves(need.op):
            raise MountError(
                f"vllm: {need.op} is needed by our layers ({need.describe()}) and is not bound: "
                f"{active.resolutions[need.op].reason}; the host has no implementation to leave it to"
            )
    if _active is not active:
        _compare_and_serve(active, vllm_config.parallel_config)
        _active = active
    return active


def op_table() -> OpTable:
    """The op table for a layer that is being built.

    Our worker has activated before. Under the host's own worker (our attention backend was chosen by name) the first
    layer does it, with the needs of attention alone.
    """
    if _active is None or _active.pid != os.getpid():
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        LEDGER.verify_applied(("core",))
        return activate_process(vllm_config, attention_needs(vllm_config)).ops
    return _active.ops


def share_host_log() -> None:
    """Show our log lines in the server's log, in its format and at its level."""
    host, ours = logging.getLogger("vllm"), logging.getLogger("baige_device")
    if host.handlers and not ours.handlers:
        ours.handlers = list(host.handlers)
        ours.setLevel(host.level)
        ours.propagate = False


def _compare_and_serve(active: Activation, parallel_config: Any) -> None:
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size > 1:
        active.verify_ranks(world.cpu_group)
    if active.settings.metrics_port:
        from baige_device.metrics import serve

        serve(active, host_rank(parallel_config, world))
