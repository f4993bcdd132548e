"""Discovery of backends: built-ins by module path, outsiders by entry point, each loaded apart from the others."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy

from baige_device.errors import BackendError
from baige_device.ops import OP_NAMES
from baige_device.registry import hookspecs
from baige_device.registry.offers import DeviceInfo, Finding, Offer, Probe, Verdict

__all__ = ["BUILT_IN", "Backend", "Source", "discover", "load_backend", "sources"]

BUILT_IN: dict[str, str] = {
    "reference": "baige_device.backends.reference.plugin",
    "cuda": "baige_device.backends.cuda.plugin",
    "kunlun": "baige_device.backends.kunlun.plugin",
}


_CHIP_HOOKS = ("baige_hardware", "baige_probe", "baige_findings")


@dataclass(frozen=True)
class Source:
    """Where a backend comes from, before anything of it is imported."""

    name: str
    origin: str
    load: Callable[[], Any]


@dataclass
class Backend:
    """A discovered backend: loaded and registered, or broken with the reason kept."""

    name: str
    origin: str
    hooks: Any = None
    error: BaseException | None = None
    traceback: str = ""
    implemented: frozenset[str] = field(default_factory=frozenset)

    @property
    def broken(self) -> bool:
        return self.error is not None

    def hardware(self) -> Verdict | None:
        """The device-node check, or None when the backend is broken or has none; its exceptions propagate."""
        if self.broken or "baige_hardware" not in self.implemented:
            return None
        verdict: Verdict = self._answer("baige_hardware", Verdict)
        return verdict

    def probe(self) -> Probe:
        """Run the probe; its exceptions propagate to the caller, which decides how loud they are."""
        probe: Probe = self._answer("baige_probe", Probe)
        return probe

    def findings(self, device: DeviceInfo) -> list[Finding]:
        """What the backend wants `doctor` to show; may run self-tests on the device."""
        if "baige_findings" not in self.implemented:
            return []
        return [item for found in self.hooks.baige_findings(device=device) for item in found]

    def offers(self, op: str, device: DeviceInfo) -> list[Offer]:
        """All offers for one op, best tier first.

        Raises:
            BackendError: the hook raises, or answers something else than offers.
        """
        if op not in self.implemented:
            return []
        try:
            answer = getattr(self.hooks, op)(device=device)
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            raise BackendError(f"{op}: backend {self.name!r} ({self.origin}): hook {op} raises {cause}") from error
        found = [offer for item in answer for offer in (item if isinstance(item, Sequence) else [item])]
        for offer in found:
            if not isinstance(offer, Offer):
                raise BackendError(f"backend {self.name!r}: hook {op}: expected Offer(s) or None, got {offer!r}")
        return sorted(found, key=lambda offer: -offer.tier)

    def _answer(self, hook: str, kind: type) -> Any:
        """What a hook without arguments returned; pluggy drops None, and a backend that says nothing is broken."""
        try:
            answers = getattr(self.hooks, hook)()
        except SystemExit as error:  # a plugin must not end the process of whoever asks it
            raise BackendError(f"backend {self.name!r}: {hook} raises SystemExit: {error}") from error
        answer = answers[0] if answers else None
        if not isinstance(answer, kind):
            raise BackendError(f"backend {self.name!r}: {hook}: expected a {kind.__name__}, got {answer!r}")
        return answer


def sources(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> list[Source]:
    """Every backend that could be loaded; imports none of them."""
    found = [Source(name, "built-in", _importer(path)) for name, path in BUILT_IN.items()]
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    for point in entry_points:
        dist = point.dist
        origin = f"{dist.name} {dist.version}" if dist else "an unknown distribution"
        found.append(Source(point.name, f"{origin} ({point.value})", point.load))
    return found


def discover(candidates: Sequence[Source] | None = None) -> list[Backend]:
    """Load every backend on its own; broken ones are listed with their traceback and hide nobody."""
    candidates = sources() if candidates is None else candidates
    return [load_backend(name, candidates) for name in dict.fromkeys(source.name for source in candidates)]


def load_backend(name: str, candidates: Sequence[Source] | None = None, *, also: Sequence[str] = ()) -> Backend:
    """Load one backend by name and no other. `also` are further values that the caller takes, for the message.

    Raises:
        BackendError: no source has this name. A backend that exists but is broken is returned with `error` set.
    """
    candidates = sources() if candidates is None else candidates
    matching = [source for source in candidates if source.name == name]
    if not matching:
        known = [*also, *sorted({source.name for source in candidates})]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise BackendError(f"backend: expected one of {', '.join(known)}, got {name!r}{hint}")
    origin = " and ".join(source.origin for source in matching)
    backend = Backend(name, origin)
    try:
        if len(matching) > 1:
            raise BackendError(f"two backends are named {name!r}: {origin}; uninstall one of them")
        _register(backend, matching[0].load())
    except (Exception, SystemExit) as error:  # a broken backend must be listed, not hide the others or end the process
        backend.error = error
        backend.traceback = traceback.format_exc()
    return backend


def _importer(path: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(path)


def _register(backend: Backend, plugin: object) -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    implemented = _hook_names(manager, plugin)
    for name in implemented:
        _refuse_misspelt(backend.name, name)
        _refuse_defaults(backend.name, name, getattr(plugin, name))
    if "baige_probe" not in implemented:
        raise BackendError(f"backend {backend.name!r}: expected a hookimpl `baige_probe`, found {sorted(implemented)}")
    manager.register(plugin, name=backend.name)
    manager.check_pending()
    backend.hooks = manager.hook
    backend.implemented = frozenset(implemented)


def _hook_names(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    return [name for name in dir(plugin) if manager.parse_hookimpl_opts(plugin, name) is not None]


def _refuse_misspelt(backend: str, name: str) -> None:
    known = (*_CHIP_HOOKS, *OP_NAMES)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known hooks: {', '.join(known)}"
        raise BackendError(f"backend {backend!r}: hookimpl {name!r} matches no hook; {hint}")


def _refuse_defaults(backend: str, name: str, function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            raise BackendError(
                f"backend {backend!r}: hookimpl {name!r}: argument {parameter.name!r} has a default value; pluggy "
                "would never fill it, remove the default"
            )
