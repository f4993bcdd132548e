"""Runs cases against one backend: picks the offer that an activation would pick for the case's need, and judges."""

from __future__ import annotations

import dataclasses
import importlib
import random
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from baige_device.errors import BackendError, OpUnsupported
from baige_device.registry.manager import Backend, Source, load_backend, sources
from baige_device.registry.offers import DeviceInfo
from baige_device.registry.resolve import Resolution, resolve
from baige_device.registry.table import OpTable
from baige_device.testing.cases import Case, all_cases
from baige_device.testing.lab import Lab
from baige_device.testing.large import memory_refusal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Outcome", "Runner", "Status", "fresh_seed", "merge_ranks", "open_backend"]

Status = Literal["passed", "failed", "refused", "absent", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of one case. `reason` explains every status but `passed`."""

    op: str
    case: str
    status: Status
    tier: str = ""
    reason: str = ""
    worst_error: float = 0.0
    seconds: float = 0.0
    trace: str = field(default="", repr=False)


def fresh_seed() -> int:
    """A new seed; print it, so that a failure can be repeated."""
    return random.SystemRandom().randrange(2**31)


def open_backend(name: str, plugin: str = "", candidates: Sequence[Source] | None = None) -> tuple[Backend, DeviceInfo]:
    """Load and probe a backend by name.

    `plugin` is `module:attribute` (or `module`) of a plugin that is not installed as an entry point; `candidates`
    replaces discovery.

    Raises:
        BackendError: unknown or broken backend, or its chip is not usable here.
    """
    found = list(sources() if candidates is None else candidates)
    if plugin:
        found = [source for source in found if source.name != name]
        found.append(Source(name, f"plugin {plugin}", lambda: _import(plugin)))
    backend = load_backend(name, found)
    if backend.error is not None:
        raise BackendError(f"backend {name!r} ({backend.origin}) is broken: {backend.error}") from backend.error
    try:
        probe = backend.probe()
    except Exception as error:  # a vendor's library raises anything
        cause = f"{type(error).__name__}: {error}"
        raise BackendError(f"backend {name!r} ({backend.origin}): its probe fails: {cause}") from error
    if not probe.present:
        raise BackendError(f"backend {name!r} ({backend.origin}) is not usable here: {probe.reason}")
    return backend, probe.device(name)


def _import(target: str) -> object:
    module, _, attribute = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


class Runner:
    """Runs cases of one process (or of one rank of a group) against one backend."""

    def __init__(
        self,
        backend: Backend,
        device: DeviceInfo,
        *,
        seed: int,
        tier: str = "",
        large: bool = False,
        torch_device: str = "",
        rank: int = 0,
        size: int = 1,
    ) -> None:
        if tier not in ("", "tuned", "portable", "reference"):
            raise ValueError(f"tier: expected tuned, portable, reference or '', got {tier!r}")
        self.backend = backend
        self.device = device
        try:
            self.torch_device = torch.device(torch_device or device.torch_device)
        except RuntimeError as error:
            raise ValueError(f"device: expected a torch device such as cuda:1, got {torch_device!r}") from error
        self.seed = seed
        self.tier = tier
        self.large = large
        self.rank = rank
        self.size = size

    def run_all(self, ops: Iterable[str] = (), on_done: Callable[[Outcome], None] | None = None) -> list[Outcome]:
        """Run every one-process case of the given ops; `on_done` sees each outcome as it falls."""
        outcomes = []
        for case in all_cases(ops):
            outcomes.append(self.run(case))
            if on_done is not None:
                on_done(outcomes[-1])
        return outcomes

    def run(self, case: Case, group: ProcessGroup | None = None) -> Outcome:
        """Run one case; failures become outcomes, only the kit's own errors are raised."""
        try:
            settled = self._absent(case) or self._skipped(case)
            if settled is not None:
                return settled
            resolutions = self._resolve(case)
        except OpUnsupported as error:
            return Outcome(case.op, case.id, "refused", reason=error.reason)
        except Exception as error:  # a broken hook or supports() is the backend's failure, not the kit's
            return self._failure(case, "", error, 0.0)
        return self._execute(case, resolutions, group)

    def _absent(self, case: Case) -> Outcome | None:
        for op in (case.op, *case.uses):
            offers = self.backend.offers(op, self.device)
            if not offers:
                status: Status = "absent" if op == case.op else "refused"
                return Outcome(case.op, case.id, status, reason=f"{self.backend.name} offers no {op}")
            if self.tier and op == case.op and all(offer.tier.label != self.tier for offer in offers):
                return Outcome(case.op, case.id, "absent", reason=f"{self.backend.name} offers no {self.tier} {op}")
        return None

    def _skipped(self, case: Case) -> Outcome | None:
        reason = ""
        if "large" in case.tags:
            reason = memory_refusal(self.torch_device) if self.large else "large: not asked for (--large)"
        if case.tags & {"graph", "streams"} and self.torch_device.type != "cuda":
            reason = f"torch device {self.torch_device.type!r} has no graphs and streams"
        return Outcome(case.op, case.id, "skipped", reason=reason) if reason else None

    def _resolve(self, case: Case) -> dict[str, Resolution]:
        choices = {case.op: self.tier} if self.tier else {}
        for op in case.uses:
            if any(offer.tier.label == self.tier for offer in self.backend.offers(op, self.device)):
                choices[op] = self.tier
        ranked = {"ranks": self.size} if "ranks" in case.tags else {}
        needs = dataclasses.replace(case, params={**case.params, **ranked}).needs()
        found = resolve(self.backend, self.device, needs, choices=choices)
        wanted = {case.op, *case.uses, "host_alloc"}
        return {op: resolution for op, resolution in found.items() if op in wanted}

    def _execute(self, case: Case, resolutions: dict[str, Resolution], group: ProcessGroup | None) -> Outcome:
        chosen = resolutions[case.op].chosen
        assert chosen is not None
        tier = chosen.offer.tier.label
        start = time.perf_counter()
        lab: Lab | None = None
        try:
            table = OpTable(self.backend.name, resolutions, "values" if "checked" in case.tags else "shapes")
            seed = zlib.crc32(f"{self.seed}:{case.name}".encode())
            lab = Lab(table, self.torch_device, seed, rank=self.rank, size=self.size, group=group)
            worst = case.run(lab)
            return Outcome(case.op, case.id, "passed", tier, worst_error=worst, seconds=time.perf_counter() - start)
        except Exception as error:  # whatever an implementation raises is its failure
            return self._failure(case, tier, error, time.perf_counter() - start)
        finally:
            if lab is not None:
                lab.close()

    def _failure(self, case: Case, tier: str, error: Exception, seconds: float) -> Outcome:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OpUnsupported):
            reason = f"refused by the call instead of by supports(): {error}"
        trace = "".join(traceback.format_exception(error))
        return Outcome(case.op, case.id, "failed", tier, reason, float("inf"), seconds, trace)


def merge_ranks(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome out of those of all ranks: the worst of them."""
    for status in ("failed", "refused", "skipped", "absent"):
        for rank, outcome in enumerate(outcomes):
            if outcome.status == status:
                return dataclasses.replace(outcome, reason=f"rank {rank}: {outcome.reason}")
    return max(outcomes, key=lambda outcome: outcome.worst_error)
