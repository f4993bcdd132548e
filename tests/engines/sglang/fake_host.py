"""A platform of someone else, as a vendor would ship it: host tensors, its own backend by default, none of our mounts.

Nothing of it activates baige-device: what the tests see is the general plugin and the attention
backend alone. The internal state carries the activation, so that a test can read it.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.fakes import distribution

__all__ = ["vendor_platform"]

PLATFORM = """
import psutil
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class VendorPlatform(SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "vendor"
    device_type = "cpu"

    def get_device_total_memory(self, device_id=0):
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device=None):
        return float(psutil.virtual_memory().total - psutil.virtual_memory().available)

    def get_available_memory(self, device_id=0):
        return psutil.virtual_memory().available, psutil.virtual_memory().total

    def get_device(self, device_id=0):
        return "cpu"

    def get_default_attention_backend(self):
        return "torch_native"
"""
PLUGIN = """
def platform():
    return "vendor_platform:VendorPlatform"


def show_the_activation():
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", add)


def add(output, scheduler, request):
    from baige_device import current

    output.internal_state["baige_device"] = {"record": current().record.as_dict(), "calls": current().ops.calls()}
"""


def vendor_platform(folder: Path) -> str:
    """Install it below `folder`; returns the path for `sys.path`."""
    return distribution(
        folder,
        "vendorchip",
        entry_points="[sglang.srt.platforms]\nvendor = vendor_plugin:platform\n"
        "[sglang.srt.plugins]\nvendor_state = vendor_plugin:show_the_activation\n",
        modules={"vendor_plugin": PLUGIN, "vendor_platform": PLATFORM},
    )
