"""One choice per op: every candidate is judged, the best that serves all needs wins, each loser keeps its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baige_device.errors import BackendError, OpUnsupported
from baige_device.ops import OP_NAMES
from baige_device.registry.manager import Backend
from baige_device.registry.offers import DeviceInfo, Need, Offer, Tier, Verdict

__all__ = ["Candidate", "Resolution", "judge", "resolve"]


@dataclass(frozen=True)
class Candidate:
    """One offer as it was judged. `refusal` is empty for an offer that could serve."""

    backend: str
    offer: Offer
    refusal: str


@dataclass(frozen=True)
class Resolution:
    """The outcome for one op; `chosen` is None when the op is absent or switched off."""

    op: str
    chosen: Candidate | None
    reason: str
    candidates: tuple[Candidate, ...]
    fell_back: bool = False


def resolve(
    backend: Backend,
    device: DeviceInfo,
    needs: Iterable[Need] = (),
    *,
    choices: Mapping[str, str] | None = None,
    reference: Backend | None = None,
    allow_fallback: bool = False,
) -> dict[str, Resolution]:
    """Resolve all ops. One that is switched off is absent, whatever the needs.

    `choices` maps an op to `tuned|portable|reference|off`. `reference` is the reference backend; an op may use it when
    the user chose that tier for the op, or when `allow_fallback` and the backend's own offers cannot serve.

    Raises:
        OpUnsupported: an op with a need, or with an explicit choice, that nothing offered can serve.
        BackendError: a hook or a `supports` raises.
    """
    wanted: dict[str, list[Need]] = {}
    for need in needs:
        if need.op not in OP_NAMES:
            raise KeyError(f"Need for {need.who}: unknown op {need.op!r}")
        wanted.setdefault(need.op, []).append(need)
    return {
        op: _resolve_op(
            op,
            backend,
            device,
            wanted.get(op, ()),
            (choices or {}).get(op, ""),
            reference if allow_fallback or (choices or {}).get(op) == "reference" else None,
        )
        for op in OP_NAMES
    }


def _resolve_op(
    op: str, backend: Backend, device: DeviceInfo, needs: Sequence[Need], choice: str, spare_backend: Backend | None
) -> Resolution:
    if choice == "off":
        return Resolution(op, None, f"switched off by BAIGE_OPS={op}=off", ())
    own = [_candidate(backend, offer, needs, choice) for offer in backend.offers(op, device)]
    spare: list[Candidate] = []
    if spare_backend is not None and spare_backend.name != backend.name:
        if spare_backend.error is not None:
            raise BackendError(f"{op}: the fall back cannot be loaded: {spare_backend.error}") from spare_backend.error
        spare = [_candidate(spare_backend, offer, needs, choice) for offer in spare_backend.offers(op, device)]
    candidates = tuple(own + spare)
    for candidate in candidates:
        if not candidate.refusal:
            fell_back = candidate in spare
            reason = f"chosen by BAIGE_OPS={op}={choice}" if choice else "best tier that serves all needs"
            if fell_back:
                reason = f"allowed by the user; {_refusals(own) or f'{backend.name} offers none'}"
            return Resolution(op, candidate, reason, candidates, fell_back)
    reason = _refusals(candidates) or f"{backend.name} offers no {op}"
    if needs or choice:
        asked = "; ".join(need.describe() for need in needs) or f"BAIGE_OPS={op}={choice}"
        raise OpUnsupported(op, backend.name, reason, asked)
    return Resolution(op, None, reason, candidates)


def judge(backend: str, offer: Offer, need: Need) -> Verdict:
    """What an offer's `supports` says to a need.

    Raises:
        BackendError: it raises, or answers something else than a verdict.
    """
    where = f"{need.op}: backend {backend!r}: supports() of {offer.label}"
    try:
        verdict: object = offer.supports(need)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        raise BackendError(f"{where} raises {cause} [asked by {need.describe()}]") from error
    if not isinstance(verdict, Verdict):
        raise BackendError(f"{where}: expected a Verdict, got {verdict!r}")
    return verdict


def _candidate(backend: Backend, offer: Offer, needs: Sequence[Need], choice: str) -> Candidate:
    return Candidate(backend.name, offer, _refusal(backend.name, offer, needs, choice))


def _refusal(backend: str, offer: Offer, needs: Sequence[Need], choice: str) -> str:
    if choice and Tier[choice.upper()] is not offer.tier:
        return f"the {choice} tier was asked for"
    if not offer.available:
        return offer.available.reason
    for need in needs:
        verdict = judge(backend, offer, need)
        if not verdict:
            return verdict.reason if len(needs) == 1 else f"{need.describe()}: {verdict.reason}"
    return ""


def _refusals(candidates: Sequence[Candidate]) -> str:
    return "; ".join(f"{item.backend} {item.offer.tier.label}: {item.refusal}" for item in candidates if item.refusal)
