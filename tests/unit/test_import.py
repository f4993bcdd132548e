"""Importing does nothing heavy: user-demand case A3."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, sys
import baige_device
from baige_device.engines import entry
import os; os.environ["BAIGE_BACKEND"] = "off"
assert entry.vllm_platform() is None and entry.sglang_platform() is None
entry.vllm_general(); entry.sglang_general()
heavy = ("baige_device", "torch", "pydantic", "pluggy")
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] in heavy)))
"""

FORKED = """
import os
import baige_device
from baige_device.engines import entry
os.environ["BAIGE_BACKEND"] = "off"
entry.vllm_platform(); entry.vllm_platform()
os.environ["BAIGE_BACKEND"] = "reference"
child = os.fork()
if child == 0:
    os._exit(0 if baige_device.activate().record.backend == "reference" else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

PARENT_ACTIVE = """
import os
import baige_device
os.environ["BAIGE_BACKEND"] = "reference"
parent = baige_device.activate()
child = os.fork()
if child == 0:
    try:
        baige_device.current()
        os._exit(2)
    except baige_device.activation.ActivationError:
        own = baige_device.activate()
        os._exit(0 if own is not parent and own.record == parent.record else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_and_switched_off_entry_points_load_only_the_stub() -> None:
    assert json.loads(run(PROBE)) == [
        "baige_device",
        "baige_device._version",
        "baige_device.engines",
        "baige_device.engines.entry",
    ]


def test_activation_in_a_forked_child() -> None:
    run(FORKED)


def test_a_forked_child_of_an_active_process_activates_itself() -> None:
    run(PARENT_ACTIVE)


def test_every_public_name_exists() -> None:
    import baige_device

    for name in baige_device.__all__:
        assert getattr(baige_device, name) is not None
    assert set(baige_device.__all__) <= set(dir(baige_device))
