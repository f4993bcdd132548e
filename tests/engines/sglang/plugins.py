"""What SGLang makes of the installed plugins in fresh processes: reads cases from stdin, prints one JSON line each.

A case is `{"environment": {...}, "paths": [...], "remove": "module:attribute"}`; paths go in front of `sys.path`.
SGLang is imported once, with `BAIGE_BACKEND=off`, and each case runs in a fork of that process as if nothing had been
loaded yet. The first line says what the import alone brought in.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from tests.engines.sglang import host


def ours() -> list[str]:
    return sorted(name for name in sys.modules if name.partition(".")[0] == "baige_device")


def main() -> None:
    host.prepare()
    import sglang.srt.platforms
    import sglang.srt.plugins

    importlib.import_module("sglang.srt.managers.scheduler")
    sglang.srt.plugins.load_plugins()
    print("ANSWER " + json.dumps({"ours": ours()}), flush=True)
    for case in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            print("ANSWER " + json.dumps(look(case)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def look(case: dict[str, Any]) -> dict[str, Any]:
    del os.environ["BAIGE_BACKEND"]
    os.environ.update(case["environment"])
    sys.path[:0] = case["paths"]
    if case["remove"]:
        module, _, path = case["remove"].partition(":")
        owner = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        delattr(owner, name)
    found: dict[str, Any] = {"platform": "", "error": "", "verified": "", "states": []}
    try:
        activate_plugins(found)
    except SystemExit as error:
        found["error"] = f"SystemExit: {error}"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["ours"] = ours()
    return found


def activate_plugins(found: dict[str, Any]) -> None:
    import sglang.srt.platforms as platforms
    import sglang.srt.plugins as plugins
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    dsa = ATTENTION_BACKENDS["dsa"]
    platforms._current_platform = None
    platform = type(platforms.current_platform)
    found["platform"] = f"{platform.__module__}.{platform.__qualname__}"
    from baige_device.errors import MountError

    if platform.__module__.startswith("baige_device."):
        try:
            platforms.current_platform.post_load_model(None)
        except MountError as error:
            found["verified"] = str(error)  # no general plugin has run yet, as when it fails
    for _ in range(2):  # a second call must change nothing
        plugins._plugins_loaded = False
        plugins.load_plugins()
    if platform.__module__.startswith("baige_device."):
        platforms.current_platform.post_load_model(None)
        platforms.current_platform.init_backend()
    from baige_device.engines.sglang.ledger import LEDGER

    found["attention"] = "baige" in ATTENTION_BACKENDS
    found["dsa_is_ours"] = ATTENTION_BACKENDS["dsa"] is not dsa
    found["applied"] = sorted(LEDGER.applied)
    if os.environ.get("BAIGE_CHECKS") == "values":
        found["states"] = [
            {"target": state.row.target, "feature": state.row.feature, "exists": state.exists, "error": state.error}
            for state in LEDGER.states()
        ]


if __name__ == "__main__":
    main()
