"""A platform of someone else, as a vendor would ship it: it takes whatever attention backend the user names.

It borrows our host-memory runner, but nothing of it activates baige-device: what the tests see is the general plugin
and the attention backend alone.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.fakes import distribution

__all__ = ["vendor_platform"]

PLATFORM = """
from baige_device.engines.vllm.platform import BaigePlatform


class VendorPlatform(BaigePlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "vendor_worker.VendorWorker"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return selected_backend.get_path()
"""

WORKER = """
import torch
from baige_device.engines.vllm.worker import BaigeWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment


class VendorWorker(BaigeWorker):
    def init_device(self):
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        self._init_workspace_and_model_runner()
"""


def vendor_platform(folder: Path) -> str:
    """Install it below `folder`; returns the path for `sys.path`."""
    return distribution(
        folder,
        "vendorchip",
        entry_points="[vllm.platform_plugins]\nvendor = vendor_plugin:platform\n",
        modules={
            "vendor_plugin": "def platform():\n    return 'vendor_platform.VendorPlatform'\n",
            "vendor_platform": PLATFORM,
            "vendor_worker": WORKER,
        },
    )
