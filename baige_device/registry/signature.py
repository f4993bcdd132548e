"""Whether an implementation takes the arguments that every call of its op passes; asked once, when it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baige_device.ops.base import OpContract

__all__ = ["mismatch"]


def mismatch(contract: OpContract, function: Callable[..., Any]) -> str:
    """What is wrong with an implementation's signature, or "" when it takes a call of `registry/bind.py`.

    Such a call passes the contract's positional arguments in order and all others by name. A function whose signature
    cannot be read (written in C) is let through.
    """
    wanted = inspect.signature(contract.signature)
    try:
        taken = _signature(function)
    except (TypeError, ValueError):
        return ""
    by_name = [item.name for item in wanted.parameters.values() if item.kind is item.KEYWORD_ONLY]
    in_order = [name for name in wanted.parameters if name not in by_name]
    try:
        taken.bind(*in_order, **dict.fromkeys(by_name))
    except TypeError as error:
        lacking = _lacking(taken, in_order, by_name)
        what = f"lacks {', '.join(lacking)}" if lacking else f"does not take a call's arguments ({error})"
        return f"{what}: every call passes all of {contract.name}{_plain(wanted)}"
    return ""


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The function's own signature, or that of what it wraps when it only passes on, as torch's decorators do."""
    own = inspect.signature(function, follow_wrapped=False)
    passes_on = all(item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in own.parameters.values())
    return inspect.signature(function) if passes_on else own


def _lacking(taken: inspect.Signature, in_order: list[str], by_name: list[str]) -> list[str]:
    """Arguments of the contract for which the implementation has no parameter."""
    parameters = taken.parameters.values()
    kinds = {item.kind for item in parameters}
    places = sum(item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters)
    names = {item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    lacking = [] if inspect.Parameter.VAR_POSITIONAL in kinds else in_order[places:]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        lacking += [name for name in by_name if name not in names]
    return lacking


def _plain(signature: inspect.Signature) -> str:
    """The signature without its annotations."""
    parameters = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
