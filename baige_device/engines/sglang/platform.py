"""The out-of-tree platform: reference backend, Kunlun and outside chips. Never used on NVIDIA.

Identity and memory come from the chip that baige-device chose; everything else is SGLang's conservative default
(no graphs, no triton), so that a chip works before it is tuned.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import DeviceMixin, PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from baige_device.engines.sglang import names
from baige_device.engines.sglang.compat import attention_is_ours, split_cores
from baige_device.engines.sglang.ledger import LEDGER, PLATFORM
from baige_device.registry.choice import Chosen, choose
from baige_device.settings import load_settings

__all__ = ["DISPATCH_KEY", "BaigePlatform", "is_ours"]

DISPATCH_KEY = "baige"
"""The key of `BaseFusedOp.register_oot_forward`."""
_OMP_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


def is_ours() -> bool:
    """Whether this process runs on our platform."""
    from sglang.srt.platforms import current_platform

    return isinstance(current_platform, BaigePlatform)


@functools.lru_cache(maxsize=1)
def _chosen() -> Chosen:
    from baige_device.engines.sglang.activate import platform_backend

    return choose(platform_backend() or load_settings().backend)


class BaigeDevice(DeviceMixin):
    """Device queries, answered by the probed chip and by torch's module of its device type."""

    _enum = PlatformEnum.OOT

    @property
    def device_name(self) -> str:
        return f"baige-{_chosen().backend.name}"

    @property
    def device_type(self) -> str:
        return _chosen().device.torch_device

    def _memory_bytes(self, device_id: int) -> tuple[int, int]:
        """(free, total)."""
        if self.device_type == "cpu":
            memory = psutil.virtual_memory()
            return int(memory.available), int(memory.total)
        free, total = self._module().mem_get_info(device_id)
        return int(free), int(total)

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return self._memory_bytes(device_id)[1]

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        free, total = self._memory_bytes((device.index if device is not None else None) or 0)
        return float(total - free)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        return self._memory_bytes(device_id)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu" if self.device_type == "cpu" else f"{self.device_type}:{device_id}"

    def set_device(self, device: Any) -> None:
        if self.device_type != "cpu":
            self._module().set_device(device)

    def get_device_name(self, device_id: int = 0) -> str:
        return _chosen().device.name

    def get_device_uuid(self, device_id: int = 0) -> str:
        return f"{self.device_name}-{device_id}"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def empty_cache(self) -> None:
        if self.device_type != "cpu":
            self._module().empty_cache()

    def synchronize(self) -> None:
        if self.device_type != "cpu":
            self._module().synchronize()

    def get_torch_distributed_backend_str(self) -> str:
        """The chip's fact `distributed_backend`, else torch's default for its device type."""
        fact = _chosen().device.facts.get("distributed_backend")
        return str(fact) if fact else super().get_torch_distributed_backend_str()


class BaigePlatform(BaigeDevice, SRTPlatform):
    """The platform that SGLang instantiates in every process."""

    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        LEDGER.note_seam(PLATFORM)
        names.add_choice()

    @property
    def masks_in_torch(self) -> bool:
        """Whether grammar masks are applied in plain torch: the chip runs neither Triton nor JIT-compiled kernels."""
        return _chosen().device.facts.get("triton") is False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """The chip's page size, and the cores of several ranks on one NUMA node of a CPU (children inherit them)."""
        page_tokens = _chosen().device.facts.get("page_tokens")
        if page_tokens and server_args.page_size is None:
            server_args.page_size = int(page_tokens)
        if self.device_type != "cpu" and server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"  # the default, flashinfer, is compiled for CUDA
        ranks = server_args.dp_size * server_args.tp_size * server_args.pp_size
        if self.device_type == "cpu" and ranks > 1 and not os.environ.get(_OMP_BIND):
            os.environ[_OMP_BIND] = split_cores(sorted(os.sched_getaffinity(0)), ranks)

    def get_default_attention_backend(self) -> str:
        return names.ATTENTION if attention_is_ours(load_settings()) else "torch_native"

    def get_dispatch_key_name(self) -> str:
        return DISPATCH_KEY

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, local_rank)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "dsa":
            return None
        from baige_device.engines.sglang.pool import BaigeDsaPool

        return BaigeDsaPool

    def post_load_model(self, model: Any) -> None:
        """Runs even when our general plugin failed, so the mounts are verified here; also without a model."""
        from baige_device.engines.sglang import moe
        from baige_device.engines.sglang.mounts import verify_worker

        verify_worker()
        if model is not None and moe.is_ours(load_settings()):
            moe.bind_scales(model)
