"""What a case is: a need, and a procedure that exercises one op and raises when it breaks its contract."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baige_device.errors import ContractError
from baige_device.ops import OP_NAMES, contract
from baige_device.registry.offers import Need
from baige_device.testing.checks import Mismatch, check_untouched, expect, twins
from baige_device.testing.explain import explain_byte
from baige_device.testing.lab import Lab
from baige_device.testing.needs import case_need

__all__ = ["SUITES", "Call", "Case", "Trial", "all_cases", "bad_inputs", "measured_cases", "rank_cases", "trial"]

SUITES: dict[str, str] = {
    "host_alloc": "suite_host_alloc",
    "uva_sparse_gather": "suite_gather",
    "uva_sparse_scatter": "suite_gather",
    "hot_cache_resolve": "suite_resolve",
    "quantize_blocks": "suite_quantize",
    "dequantize_blocks": "suite_dequantize",
    "fp8_all_gather": "suite_all_gather",
    "attend_paged": "suite_attend",
    "sparse_attention": "suite_sparse",
    "merge_attention": "suite_merge",
    "index_topk": "suite_topk",
    "kv_write": "suite_kv_write",
    "moe_dispatch": "suite_moe",
    "moe_expert_ffn": "suite_moe_ffn",
    "moe_combine": "suite_moe",
}
"""Op -> module of this package that holds its cases."""


@dataclass(frozen=True)
class Call:
    """One finished call: the arguments now, their CPU twins from before it, and what it returned."""

    args: Mapping[str, Any]
    before: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Trial:
    """One call of one op on one set of random inputs.

    `build` draws the arguments (by the contract's names, buffers poisoned), `verify` compares with the float64 or
    byte-exact oracle and returns the worst error. Around the call every byte that the contract does not let the op
    write is checked to be unchanged. `args_valid` is False for inputs that only checked mode refuses.
    """

    op: str
    build: Callable[[Lab], dict[str, Any]]
    verify: Callable[[Call], float]
    mutates: tuple[str, ...] = ("out", "lse")
    args_valid: bool = True
    snapshot: bool = True

    def __call__(self, lab: Lab) -> float:
        args = self.build(lab)
        if self.args_valid:
            contract(self.op).check(True, **args)
        before = twins(args) if self.snapshot else dict(args)
        lab.synchronize()
        result = getattr(lab.ops, self.op)(**args)
        lab.synchronize()
        return self.judge(Call(args, before, result))

    def judge(self, call: Call) -> float:
        """Check a finished call; a wrong byte is told in the op's own words."""
        try:
            if self.snapshot:
                check_untouched(call.args, call.before, self.mutates)
            return self.verify(call)
        except Mismatch as error:
            told = explain_byte(self.op, error.argument, call.args, call.before, error.byte)
            if not told:
                raise
            raise Mismatch(f"{error}; {told}", error.argument, error.byte) from error


@dataclass(frozen=True)
class Case:
    """One row of the matrix.

    `params` are the need (see `needs.py`); `uses` names other ops of the same backend that the procedure calls. Tags:
    `large` (needs gigabytes), `graph` and `streams` (need a device with graphs and streams), `ranks` (needs a group).
    """

    op: str
    id: str
    run: Callable[[Lab], float]
    params: Mapping[str, Any] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.op}/{self.id}"

    def needs(self) -> list[Need]:
        """The needs of the op and of every op it uses, in the same words."""
        return [case_need(op, self.id, self.params) for op in (self.op, *self.uses)]


def trial(
    op: str,
    id: str,
    build: Callable[[Lab], dict[str, Any]],
    verify: Callable[[Call], float],
    params: Mapping[str, Any],
    *,
    mutates: tuple[str, ...] = ("out", "lse"),
    args_valid: bool = True,
    device_variants: bool = False,
) -> list[Case]:
    """A case made of one call, and with `device_variants` the same inside a replayed graph and on a second stream."""
    from baige_device.testing.variants import GraphTrial, StreamTrial

    single = Trial(op, build, verify, mutates, args_valid)
    found = [Case(op, id, single, params)]
    if device_variants:
        graph_params = {**params, "graph": True}
        found.append(Case(op, f"{id}-graph", GraphTrial(single), graph_params, tags=frozenset({"graph"})))
        found.append(Case(op, f"{id}-streams", StreamTrial(single), params, tags=frozenset({"streams"})))
    return found


def bad_inputs(
    op: str,
    good: Callable[[Lab], dict[str, Any]],
    changes: Mapping[str, Callable[[Lab, dict[str, Any]], dict[str, Any]]],
    params: Mapping[str, Any],
    *,
    mutates: tuple[str, ...] = ("out", "lse"),
    uses: tuple[str, ...] = (),
) -> Case:
    """A case that makes one bad call per entry of `changes` (argument -> new arguments) in checked mode.

    Each must raise `ContractError` that names the op and the argument, and must write nothing.
    """

    def run(lab: Lab) -> float:
        for label, change in changes.items():
            args = good(lab)
            args.update(change(lab, args))
            before = twins(args)
            _expect_refusal(lab, op, label, args)
            check_untouched(args, before, ())
        return 0.0

    return Case(op, "bad-inputs", run, params, uses, frozenset({"checked"}))


def _expect_refusal(lab: Lab, op: str, label: str, args: dict[str, Any]) -> None:
    argument = label.split(":")[0]
    try:
        getattr(lab.ops, op)(**args)
    except ContractError as error:
        expect(error.op == op, f"bad {label}: the error names op {error.op!r}, expected {op!r}")
        expect(
            error.argument.startswith(argument),
            f"bad {label}: the error names argument {error.argument!r}, expected {argument!r}",
        )
        return
    expect(False, f"bad {label}: expected ContractError naming {op} and {argument}, got no error")


def all_cases(ops: Iterable[str] = ()) -> list[Case]:
    """Every one-process case of the given ops (default: all ops), in the order of `OP_NAMES`."""
    return _collect("cases", ops)


def rank_cases(ops: Iterable[str] = ()) -> list[Case]:
    """Every case that runs on all ranks of a process group."""
    return _collect("rank_cases", ops)


def measured_cases(ops: Iterable[str] = ()) -> list[Case]:
    """One large call per op, for timing; every `run` is a `Trial`."""
    return _collect("measured", ops)


def _collect(function: str, ops: Iterable[str]) -> list[Case]:
    wanted = tuple(ops) or OP_NAMES
    unknown = sorted(set(wanted) - set(OP_NAMES))
    if unknown:
        raise KeyError(f"unknown op {', '.join(unknown)}; known: {', '.join(OP_NAMES)}")
    found: list[Case] = []
    for name in dict.fromkeys(SUITES[op] for op in OP_NAMES if op in wanted):
        make = getattr(importlib.import_module(f"baige_device.testing.{name}"), function, None)
        found.extend(make() if make is not None else [])
    found = [case for case in found if case.op in wanted]
    names = [case.name for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two conformance cases share a name: {', '.join(twice)}")
    return sorted(found, key=lambda case: OP_NAMES.index(case.op))
