"""What one call through the frozen op table costs over the bare function, beside a pluggy hook call (CPU only).

    python benchmarks/op_call_overhead.py [OUT.json]

Verified first: table and hook return what the bare function returns. Goal: at most 150 ns over the bare function.
"""

from __future__ import annotations

import json
import platform
import sys
import timeit
from datetime import date
from pathlib import Path

import pluggy

from baige_device import __version__
from baige_device.registry.offers import Offer, Tier
from baige_device.registry.resolve import Candidate, Resolution
from baige_device.registry.table import OpTable

CALLS, REPEATS, GOAL_NS = 200_000, 15, 150.0


def kernel(values: object, cache: object, slots: object) -> object:
    return cache


def table_call() -> object:
    chosen = Candidate("bench", Offer(kernel, Tier.TUNED), "")
    return OpTable("bench", {"kv_write": Resolution("kv_write", chosen, "", (chosen,))})


class Spec:
    @pluggy.HookspecMarker("bench")(firstresult=True)
    def kv_write(self, values: object, cache: object, slots: object) -> object: ...


class Plugin:
    @pluggy.HookimplMarker("bench")
    def kv_write(self, values: object, cache: object, slots: object) -> object:
        return cache


def hook_call() -> object:
    manager = pluggy.PluginManager("bench")
    manager.add_hookspecs(Spec)
    manager.register(Plugin())
    return manager.hook


def nanoseconds(statement: str, names: dict[str, object]) -> float:
    timer = timeit.Timer(statement, globals=names)
    return min(timer.repeat(REPEATS, CALLS)) / CALLS * 1e9  # other work on the machine only ever adds


def main() -> None:
    table, hook, token = table_call(), hook_call(), object()
    assert table.kv_write(1, token, 3) is token  # type: ignore[attr-defined]
    assert hook.kv_write(values=1, cache=token, slots=3) is token  # type: ignore[attr-defined]
    names: dict[str, object] = {"kernel": kernel, "table": table, "hook": hook, "token": token}
    bare = nanoseconds("kernel(1, token, 3)", names)
    through_table = nanoseconds("table.kv_write(1, token, 3)", names)
    through_hook = nanoseconds("hook.kv_write(values=1, cache=token, slots=3)", names)
    over = through_table - bare
    print(f"bare {bare:.0f} ns, table {through_table:.0f} ns (+{over:.0f}, goal +{GOAL_NS:.0f})")
    print(f"pluggy hook {through_hook:.0f} ns, {through_hook / through_table:.0f} times the table")
    if len(sys.argv) > 1:
        case = {
            "op": "kv_write",
            "case": "frozen op call, checks=auto, tuned tier",
            "us": through_table / 1e3,
            "peers_us": {"bare function": bare / 1e3, "pluggy hook": through_hook / 1e3},
            "percent_of_limit": 100 * bare / through_table,
            "limit": "the bare function",
        }
        result = {
            "card": platform.processor() or platform.machine(),
            "versions": {
                "baige-device": __version__,
                "python": platform.python_version(),
                "pluggy": pluggy.__version__,
            },
            "date": date.today().isoformat(),
            "cases": [case],
        }
        Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(0 if over <= GOAL_NS else 1)


if __name__ == "__main__":
    main()
