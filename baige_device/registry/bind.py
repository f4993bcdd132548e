"""Bind an implementation to its op: count the call, check it if asked, and call straight through.

The binding is generated with the contract's own signature, as dataclasses generate `__init__`: passing arguments by
name costs about 60 ns, where `*args, **kwargs` costs 160 (`benchmarks/op_call_overhead.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from baige_device.ops.base import OpContract

__all__ = ["bind"]

_TEMPLATE = """
def make(_function, _check, _values, _defaults):
    _calls = 0
    def {name}({parameters}):
        nonlocal _calls
        {guard}_calls += 1
        return _function({arguments})
    return {name}, lambda: _calls
"""


def bind(
    contract: OpContract, function: Callable[..., Any], *, check: bool, values: bool = False
) -> tuple[Callable[..., Any], Callable[[], int]]:
    """Return the bound op and a reader of its call count; `check` puts the contract's checks in front."""
    signature = inspect.signature(contract.signature)
    arguments = ", ".join(_passed(parameter) for parameter in signature.parameters.values())
    source = _TEMPLATE.format(
        name=contract.name,
        parameters=_parameters(signature),
        arguments=arguments,
        guard=f"_check(_values, {arguments})\n        " if check else "",
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<baige_device op {contract.name}>", "exec"), namespace)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    bound, calls = namespace["make"](function, contract.check, values, defaults)
    bound.__doc__ = contract.signature.__doc__
    bound.__wrapped__ = function
    bound.checked = check
    return bound, calls


def _parameters(signature: inspect.Signature) -> str:
    parts = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"=_defaults[{parameter.name!r}]"
        parts.append(parameter.name + default)
    return ", ".join(parts)


def _passed(parameter: inspect.Parameter) -> str:
    return f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
