"""What `doctor` finds out, as plain data."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any, TypedDict

from baige_device.cli.diagnosis_hisparse import diagnose_hisparse
from baige_device.engines.ledger import Ledger
from baige_device.errors import BaigeError
from baige_device.ops import OP_NAMES
from baige_device.ops.host_alloc.limits import memlock_limit, memory_limits
from baige_device.record import installed_versions
from baige_device.registry.choice import Chosen, Survey, choose, survey, unanswered
from baige_device.registry.manager import load_backend
from baige_device.registry.resolve import Candidate, Resolution, resolve
from baige_device.settings import Settings, load_settings

__all__ = ["Diagnosis", "MissingTarget", "diagnose"]

_ENGINES = {"vllm": "baige_device.engines.vllm", "sglang": "baige_device.engines.sglang"}
_GIB = 1 << 30


class MissingTarget(TypedDict):
    """A mount target that the installed engine lacks."""

    target: str
    feature: str
    error: str


@dataclass
class Diagnosis:
    """The whole report; `problems` lists what was asked for and cannot work."""

    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    chosen: str = ""
    backends: list[dict[str, Any]] = field(default_factory=list)
    ops: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Every candidate of each op."""
    absent: dict[str, str] = field(default_factory=dict)
    """Ops that would not be bound, with the reason."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """What the chosen backend found out about its chip."""
    engines: list[dict[str, Any]] = field(default_factory=list)
    host_memory: dict[str, Any] = field(default_factory=dict)
    hisparse: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What will matter once an engine is here, though nothing that was asked for is broken."""
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def diagnose(*, mounts: bool = True) -> Diagnosis:
    """Collect everything; failures become entries, never exceptions."""
    found = Diagnosis(installed_versions())
    try:
        settings = load_settings()
    except BaigeError as error:
        found.problems.append(str(error))
        settings = Settings.model_construct()
    found.settings = settings.model_dump()
    _diagnose_backends(found, settings)
    for name, path in _ENGINES.items():
        _diagnose_engine(found, name, importlib.import_module(f"{path}.ledger").LEDGER, mounts)
        if settings.enabled and found.engines[-1]["installed"]:
            _diagnose_platform(found, importlib.import_module(f"{path}.activate"))
    _diagnose_memory(found)
    found.hisparse, problems = diagnose_hisparse(settings.hisparse, found.ops, found.absent)
    found.problems += problems
    return found


def _diagnose_backends(found: Diagnosis, settings: Settings) -> None:
    if settings.enabled:
        try:
            chosen = choose(settings.backend)
            found.chosen = chosen.backend.name
            _diagnose_ops(found, settings, chosen)
            found.findings = [dataclasses.asdict(item) for item in chosen.backend.findings(chosen.device)]
        except BaigeError as error:
            bare = settings.backend == "auto" and importlib.util.find_spec("torch") is None
            (found.notes if bare else found.problems).append(str(error))
        except (Exception, SystemExit) as error:  # a hook of somebody's backend raises anything
            found.problems.append(f"backend {found.chosen!r}: {type(error).__name__}: {error}")
    surveyed = survey()
    if settings.backend == "auto":
        found.problems += unanswered(surveyed)
    for item in surveyed:
        found.backends.append(
            {
                "name": item.backend.name,
                "origin": item.backend.origin,
                "hardware": item.hardware,
                "usable": item.present,
                "reason": _reason(item),
                "traceback": item.backend.traceback,
                "facts": dict(item.probe.facts) if item.probe else {},
                "chosen": item.backend.name == found.chosen,
            }
        )


def _reason(item: Survey) -> str:
    if item.error is not None:
        return f"{type(item.error).__name__}: {item.error}"
    return item.probe.reason if item.probe else ""


def _diagnose_ops(found: Diagnosis, settings: Settings, chosen: Chosen) -> None:
    resolutions = resolve(
        chosen.backend,
        chosen.device,
        choices=settings.ops,
        reference=load_backend("reference"),
        allow_fallback=settings.fallback == "reference",
    )
    for op in OP_NAMES:
        resolution = resolutions[op]
        broken = _broken_target(resolution)
        if broken:
            found.problems.append(broken)
        if resolution.chosen is None:
            found.absent[op] = resolution.reason
        found.ops[op] = [
            {
                "candidate": f"{item.backend} {item.offer.label}",
                "tier": item.offer.tier.label,
                "chosen": item is resolution.chosen,
                "reason": _verdict(item, resolution, broken),
                "facts": dict(item.offer.facts),
            }
            for item in resolution.candidates
        ]


def _broken_target(resolution: Resolution) -> str:
    """Load what would be bound, as activation does; its error, or ""."""
    from baige_device.registry.table import load_target  # imports torch, which may be missing here

    if resolution.chosen is not None:
        try:
            load_target(resolution.op, resolution.chosen)
        except BaigeError as error:
            return str(error)
    return ""


def _verdict(item: Candidate, resolution: Resolution, broken: str) -> str:
    if item is resolution.chosen:
        return broken or resolution.reason
    return item.refusal or "a better tier serves"


def _diagnose_engine(found: Diagnosis, name: str, ledger: Ledger, mounts: bool) -> None:
    installed = ledger.window.installed()
    entry: dict[str, Any] = {
        "name": name,
        "installed": installed,
        "accepted": ledger.window.accepted,
        "targets": f"{len(ledger.rows)} in the ledger",
        "missing": [],
        "platform": "",
    }
    found.engines.append(entry)
    if installed is None:
        return
    try:
        ledger.window.check()
    except BaigeError as error:
        found.problems.append(str(error))
        return
    if mounts:
        states = [state for state in ledger.states() if state.applies]
        missing = [state for state in states if not state.exists]
        entry["targets"] = f"{len(states) - len(missing)} of {len(states)} exist"
        entry["missing"] = [
            MissingTarget(target=state.row.target, feature=state.row.feature, error=state.error) for state in missing
        ]
        found.problems += [state.error for state in missing]


def _diagnose_platform(found: Diagnosis, activate: Any) -> None:
    try:
        found.engines[-1]["platform"] = activate.describe_platform()
    except BaigeError as error:
        found.engines[-1]["platform"] = "none can be provided"
        if str(error) not in found.problems:
            found.problems.append(str(error))


def _diagnose_memory(found: Diagnosis) -> None:
    for limit in memory_limits():
        found.host_memory[limit.name] = _gib(limit.available_bytes)
    memlock = memlock_limit()
    found.host_memory["pinned memory (RLIMIT_MEMLOCK)"] = (
        "does not bind (unlimited, or CAP_IPC_LOCK)" if memlock is None else _gib(memlock.available_bytes)
    )


def _gib(value: int) -> str:
    return f"{value / _GIB:.2f} GiB ({value} bytes)"
