"""What vLLM makes of the installed plugins in fresh processes: reads cases from stdin, prints one JSON line each.

A case is `{"environment": {...}, "paths": [...]}`; paths go in front of `sys.path`. vLLM is imported once, and each
case runs in a fork of that process, before any platform was chosen.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch  # noqa: F401  (imported once, for all forks)
import vllm.platforms
import vllm.plugins


def main() -> None:
    assert vllm.platforms._current_platform is None, "a platform was chosen before the fork"
    for case in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            print("ANSWER " + json.dumps(look(case)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def look(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(case["environment"])
    sys.path[:0] = case["paths"]
    found: dict[str, Any] = {"platform": "", "error": "", "names": []}
    try:
        for _ in range(2):  # a second call must change nothing
            vllm.plugins.load_general_plugins()
            vllm.plugins.plugins_loaded = False
        platform = type(vllm.platforms.current_platform)
        found["platform"] = f"{platform.__module__}.{platform.__qualname__}"
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        found["names"] = [name for name in AttentionBackendEnum.__members__ if name.startswith("BAIGE")]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["ours"] = sorted(name for name in sys.modules if name.partition(".")[0] == "baige_device")
    return found


if __name__ == "__main__":
    main()
