"""Activation: choose the backend, resolve the ops, freeze the table. Once per process, in every process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baige_device.errors import ActivationError, OpUnsupported
from baige_device.record import ActivationRecord, compare_records, make_record
from baige_device.registry.choice import Chosen, choose
from baige_device.registry.manager import Source, load_backend
from baige_device.registry.offers import DeviceInfo, Need
from baige_device.registry.resolve import Resolution, judge, resolve
from baige_device.registry.table import OpTable
from baige_device.settings import Settings, load_settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Activation", "activate", "current", "deactivate"]

logger = logging.getLogger("baige_device")


@dataclass(frozen=True)
class Activation:
    """The outcome: the frozen ops, the device, and the record."""

    ops: OpTable
    device: DeviceInfo
    record: ActivationRecord
    settings: Settings
    resolutions: dict[str, Resolution]
    pid: int

    def require(self, need: Need) -> None:
        """Check a need that only became known after activation.

        Raises:
            OpUnsupported: the bound implementation does not serve it, or the op is not bound.
            BackendError: the implementation's `supports` raises.
        """
        resolution = self.resolutions[need.op]
        if resolution.chosen is None:
            raise OpUnsupported(need.op, self.record.backend, resolution.reason, need.describe())
        verdict = judge(resolution.chosen.backend, resolution.chosen.offer, need)
        if not verdict:
            tier = resolution.chosen.offer.tier.label
            raise OpUnsupported(need.op, self.record.backend, f"{tier}: {verdict.reason}", need.describe())

    def verify_ranks(self, group: ProcessGroup | None = None) -> None:
        """Compare this process's record with those of all ranks; a collective, so every rank must call it.

        Raises:
            RankMismatch: on every rank, naming the first difference.
        """
        import torch.distributed as dist

        records: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(records, self.record.as_dict(), group=group)
        compare_records(records)


_lock = threading.Lock()
_current: Activation | None = None


def activate(
    settings: Settings | None = None,
    *,
    needs: Iterable[Need] = (),
    engine: str = "",
    optimizations: Sequence[str] = (),
    candidates: Sequence[Source] | None = None,
) -> Activation:
    """Activate baige-device in this process, or return the activation that exists.

    `needs` are judged before anything is bound, but for ops that the user switched off, which stay absent; `engine` is
    a text such as `vllm 0.33.0`; `candidates` replaces discovery (for tests and embedding).

    Raises:
        BackendError: no backend can be chosen, or the chosen one is faulty: a hook raises, an implementation cannot be
            loaded or does not take the contract's arguments. OpUnsupported: a need cannot be served.
        ActivationError: `backend=off`, or this process is active with other settings.
    """
    global _current
    settings = settings or load_settings()
    if not settings.enabled:
        raise ActivationError("activate: backend=off switches baige-device off; nothing can be activated")
    needs = list(needs)
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            _refuse_other_settings(_current, settings)
            for need in needs:
                if settings.ops.get(need.op) != "off":
                    _current.require(need)
            return _current
        activation = _make(settings, needs, engine, tuple(optimizations), candidates)
        _install_torch_ops()
        _current = activation
    logger.info("%s", activation.record.line())
    for op in activation.record.fallbacks:
        logger.warning("%s runs on the reference backend: %s", op, activation.resolutions[op].reason)
    return activation


def current() -> Activation:
    """The activation of this process.

    Raises:
        ActivationError: there is none (also in a forked child of an active process: activate there again).
    """
    if _current is None or _current.pid != os.getpid():
        raise ActivationError(
            f"baige-device is not active in process {os.getpid()}; call baige_device.activate() first"
        )
    return _current


def deactivate() -> None:
    """Forget the activation of this process (tests, and engines that are started one after another in a process)."""
    global _current
    with _lock:
        _current = None


def _make(
    settings: Settings,
    needs: list[Need],
    engine: str,
    optimizations: tuple[str, ...],
    candidates: Sequence[Source] | None,
) -> Activation:
    chosen: Chosen = choose(settings.backend, candidates)
    resolutions = resolve(
        chosen.backend,
        chosen.device,
        needs,
        choices=settings.ops,
        reference=load_backend("reference"),
        allow_fallback=settings.fallback == "reference",
    )
    table = OpTable(chosen.backend.name, resolutions, settings.checks)
    record = make_record(
        backend=chosen.backend.name,
        device=chosen.device.name,
        reason=chosen.reason,
        engine=engine,
        resolutions=resolutions,
        optimizations=optimizations,
        settings=settings,
    )
    return Activation(table, chosen.device, record, settings, resolutions, os.getpid())


def _install_torch_ops() -> None:
    from baige_device.registry import torch_library  # imports torch, which only an active process needs

    torch_library.install(lambda: current().ops)


def _refuse_other_settings(active: Activation, settings: Settings) -> None:
    if active.settings != settings:
        ours, theirs = active.settings.model_dump(), settings.model_dump()
        key = next(key for key in ours if ours[key] != theirs[key])
        raise ActivationError(
            f"activate: already active with {key}={ours[key]!r}, and was asked for {key}={theirs[key]!r}"
        )
