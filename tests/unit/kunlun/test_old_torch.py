"""The backend in a torch 2.5-like process: newer names absent, no inferred schemas, no Triton, no `torch.ops._C`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kunlun_emulator.install import SITE

_ROOT = Path(__file__).resolve().parents[3]
_SCRIPT = """
import builtins, importlib, pkgutil, sys
before = builtins.__import__
sys.modules["triton"] = None
import torch
del torch.accelerator
def no_custom_op(*args, **kwargs):
    raise AssertionError("torch.library.custom_op infers schemas that torch 2.5 refuses")
torch.library.custom_op = no_custom_op
class Closed:
    def __getattr__(self, name):
        raise AssertionError("torch.ops._C belongs to other plugins")
torch.ops._C = Closed()
class NoIntel:
    def __getattr__(self, name):
        raise AssertionError("torch.xpu is never this device")
torch.xpu = NoIntel()
import baige_device
import baige_device.backends.kunlun as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"{package.__name__}.{module.name}")
active = baige_device.activate()
assert active.record.backend == "kunlun", active.record
values = torch.randn(3, 1, 576).to(torch.bfloat16)
cache = torch.zeros(2, 64, 1, 576, dtype=torch.bfloat16)
active.ops.kv_write(values, cache, torch.tensor([5, -1, 70]))
assert torch.equal(cache[0, 5], values[0]) and torch.equal(cache[1, 6], values[2])
assert builtins.__import__ is before
print("fine")
"""


def test_import_registration_and_an_op() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(_ROOT)]), "OMP_NUM_THREADS": "1"}
    env["KUNLUN_EMULATOR_PROFILE"] = "torch2.5"
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def test_importing_the_plugin_loads_no_torch_and_no_vendor_module() -> None:
    code = (
        "import sys, baige_device.backends.kunlun.plugin; "
        "print([m for m in ('torch', 'torch_xmlir', 'kunlun_ops', 'xspeedgate_ops') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(_ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
