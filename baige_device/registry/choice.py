"""Which backend this process runs on: the one that the user named, or the one chip that is present."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from baige_device.errors import BackendError
from baige_device.registry.manager import Backend, Source, discover, load_backend, sources
from baige_device.registry.offers import DeviceInfo, Probe

__all__ = ["Chosen", "Survey", "choose", "survey", "unanswered"]

logger = logging.getLogger("baige_device")

_NO_BACKENDS = ("auto", "off")
"""What else `BAIGE_BACKEND` may be."""


@dataclass(frozen=True)
class Chosen:
    """The backend of this process, its device, and why it was chosen."""

    backend: Backend
    device: DeviceInfo
    reason: str


@dataclass(frozen=True)
class Survey:
    """One candidate as `doctor` shows it."""

    backend: Backend
    hardware: bool | None
    probe: Probe | None
    error: BaseException | None

    @property
    def present(self) -> bool:
        return self.probe is not None and self.probe.present

    @property
    def mute(self) -> bool:
        """It fails before anybody knows whether its chip is here."""
        return self.error is not None and self.hardware is None


def survey(candidates: Sequence[Source] | None = None) -> list[Survey]:
    """Load and probe every candidate; failures are recorded, never raised."""
    return [_survey_one(backend) for backend in discover(candidates)]


def unanswered(found: Sequence[Survey]) -> list[str]:
    """A text for each backend that cannot say whether its chip is here, naming plugin, distribution and error.

    Such a plugin is broken or installed twice, or fails before it has told whether there is hardware.
    """
    return [
        f"backend {item.backend.name!r} ({item.backend.origin}) cannot say whether its chip is here: {_cause(item)}; "
        "a backend that BAIGE_BACKEND names is chosen without asking it"
        for item in found
        if item.mute
    ]


def choose(name: str, candidates: Sequence[Source] | None = None) -> Chosen:
    """Choose the backend: `auto`, or a name.

    With a name no other plugin is imported. With `auto` the one present chip wins and `reference` serves a machine
    without any; a plugin that cannot say whether its chip is here is a warning, once a process.

    Raises:
        BackendError: unknown, broken or absent backend that was named; two chips present; or a chip whose hardware is
            in the machine while its plugin fails. The first cause is chained.
    """
    candidates = sources() if candidates is None else candidates
    return _choose_named(name, candidates) if name != "auto" else _choose_present(candidates)


def _choose_named(name: str, candidates: Sequence[Source]) -> Chosen:
    backend = load_backend(name, candidates, also=_NO_BACKENDS)
    found = _survey_one(backend)
    if found.error is not None:
        raise _failure(found, f"it was asked for by name (BAIGE_BACKEND={name})") from found.error
    assert found.probe is not None
    if not found.probe.present:
        raise BackendError(
            f"backend {name!r} ({backend.origin}) was asked for (BAIGE_BACKEND={name}) and is not usable: "
            f"{found.probe.reason}{_hint(found)}"
        )
    return Chosen(backend, found.probe.device(name), f"named by BAIGE_BACKEND: {found.probe.reason}")


def _choose_present(candidates: Sequence[Source]) -> Chosen:
    found = survey(candidates)
    for item in found:
        if item.error is not None and item.hardware:
            raise _failure(item, "its hardware is in this machine") from item.error
        if item.error is not None and item.hardware is False:
            logger.debug("backend %s fails and its hardware is absent: %s", item.backend.name, item.error)
    for text in unanswered(found):
        _warn_once(text)
    present = [item for item in found if item.present and item.backend.name != "reference"]
    if len(present) > 1:
        listed = ", ".join(f"{item.backend.name!r} ({item.backend.origin})" for item in present)
        raise BackendError(f"more than one chip is present: {listed}; set BAIGE_BACKEND to the one to use")
    if present:
        probe = present[0].probe
        assert probe is not None
        return Chosen(present[0].backend, probe.device(present[0].backend.name), f"the chip present: {probe.reason}")
    mute = ", ".join(item.backend.name for item in found if item.mute)
    reason = f"no chip is known to be present: {mute} could not answer" if mute else "no accelerator is present"
    reference = next((item for item in found if item.backend.name == "reference"), None)
    if reference is None:
        raise BackendError(f"{reason}, and the reference backend is not among the candidates")
    if not reference.present or reference.probe is None:
        why = reference.probe.reason if reference.probe else reference.error
        raise BackendError(f"{reason}, and the reference backend is not usable: {why}")
    return Chosen(reference.backend, reference.probe.device("reference"), reason)


@functools.cache
def _warn_once(text: str) -> None:
    """An engine chooses several times in a process: for its platform, its mounts and the ops."""
    logger.warning("%s", text)


def _survey_one(backend: Backend) -> Survey:
    if backend.broken:
        return Survey(backend, None, None, backend.error)
    hardware: bool | None = None
    try:
        verdict = backend.hardware()
        hardware = None if verdict is None else verdict.ok
        return Survey(backend, hardware, backend.probe(), None)
    except Exception as error:  # a failing vendor library must not hide the other candidates
        return Survey(backend, hardware, None, error)


def _failure(item: Survey, why: str) -> BackendError:
    return BackendError(
        f"backend {item.backend.name!r} ({item.backend.origin}) fails and {why}: {_cause(item)}{_hint(item)}; run "
        "`baige-device doctor` or set BAIGE_BACKEND=off to start without baige-device"
    )


def _cause(item: Survey) -> str:
    return f"{type(item.error).__name__}: {' '.join(str(item.error).split())}"


def _hint(item: Survey) -> str:
    """What the user can do about a built-in chip; one from outside says it in its own reasons."""
    name = item.backend.name
    if name in ("cuda", "kunlun") and item.hardware is False:
        return "; for its device nodes load the chip's driver, or give them to the container"
    if name == "cuda" and importlib.util.find_spec("torch") is None:
        return "; `pip install 'baige-device[cuda]'` brings torch"
    return ""
