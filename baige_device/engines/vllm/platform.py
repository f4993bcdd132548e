"""vLLM's platform for backends whose tensors are host tensors: the reference, Kunlun's emulator, chips from outside.

Imported only when `activate.platform_path` answered. No compiled library of vLLM is loaded.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from baige_device.engines.vllm import names
from baige_device.engines.vllm.compat import attention_name
from baige_device.engines.vllm.hisparse_options import adopt_host_options, hisparse_on, refuse_unserved
from baige_device.engines.vllm.options import engine_settings
from baige_device.errors import MountError, SettingsError
from baige_device.registry.choice import choose
from baige_device.settings import load_settings

__all__ = ["BaigePlatform"]

_CHOSEN = choose(load_settings().backend)
_UNSERVED = ("has_sink", "use_mm_prefix", "use_per_head_quant_scales", "use_rswa", "use_dcp", "use_pcp")
"""Fields of the host's selector that ask for attention which no op of ours computes."""
HOST_SPARSE = "baige_device.engines.vllm.hisparse_mla.HostSparseMlaBackend"
"""Goes by the name of the sparse backend while HiSparse is on."""


class BaigePlatform(Platform):
    """An out-of-tree platform on the torch device `cpu`."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = str(_CHOSEN.device.facts.get("distributed_backend", "gloo"))
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"
    simple_compile_backend = "eager"
    page_tokens = int(_CHOSEN.device.facts.get("page_tokens", 0))
    """KV page size that the chip's kernels read in place; 0 leaves it to the host."""
    masks_in_torch = _CHOSEN.device.facts.get("triton") is False
    """Whether grammar masks are applied in plain torch, since the chip runs neither Triton nor JIT-compiled kernels."""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _CHOSEN.device.name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(psutil.Process().memory_info().rss)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Host memory has no current device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.get_num_threads()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """All of `supported_dtypes`."""

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        raise MountError(f"vllm: quantization {quant!r}: expected an unquantised model on this platform")

    @classmethod
    def import_kernels(cls) -> None:
        """The host's compiled libraries are built for CUDA; what is called by name the worker defines."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """The host's native implementations serve; its CUDA kernels must not be imported."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from baige_device.engines.vllm.kernels import register_kernels

        register_kernels()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Runs before the host's own checks, of which the one on HiSparse admits NVIDIA alone."""
        adopt_host_options(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Choose our worker and switch off what needs an accelerator; refuses settings that cannot hold any more."""
        from vllm.config import CompilationMode, CUDAGraphMode

        _check_engine_options(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "baige_device.engines.vllm.worker.BaigeWorker"
        parallel.disable_custom_all_reduce = True
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        vllm_config.scheduler_config.async_scheduling = False
        # Forked workers would inherit torch's thread pool locks; runner V2 needs Triton.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        asked = [flag for flag in _UNSERVED if getattr(attn_selector_config, flag, False)]
        if asked:
            raise MountError(f"vllm: attention with {', '.join(asked)} is not served by our platform")
        wanted = names.DENSE
        if attn_selector_config.use_mla:
            wanted = names.SPARSE if attn_selector_config.use_sparse else names.MLA
        known = attention_name(wanted)
        if selected_backend is not None and selected_backend.name != known:
            raise MountError(
                f"vllm: --attention-backend: expected {known} on this platform, got {selected_backend.name}"
            )
        return HOST_SPARSE if wanted == names.SPARSE and _hisparse_on() else names.CLASSES[wanted]

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        """A class the host's layer can construct; our MLA runs prefill on the latent cache and never calls it."""
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

        return MLAPrefillBackendEnum.CPU.get_class()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "baige_device.engines.vllm.communicator.Communicator"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner's layer names need no device-specific order."""


def _hisparse_on() -> bool:
    """Of the engine whose layers are being built."""
    from vllm.config import get_current_vllm_config

    return hisparse_on(get_current_vllm_config())


def _check_engine_options(vllm_config: Any) -> None:
    settings = engine_settings(vllm_config)
    if settings.backend not in ("auto", _CHOSEN.backend.name):
        raise SettingsError(
            f"--additional-config: baige.backend: the platform was made for {_CHOSEN.backend.name!r} (BAIGE_BACKEND), "
            f"got {settings.backend!r}"
        )
    if vllm_config.model_config is not None:
        refuse_unserved(vllm_config)
