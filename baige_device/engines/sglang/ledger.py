"""The ledger of the SGLang mount, and how its rows are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from baige_device.engines.ledger import Ledger, Row
from baige_device.engines.sglang.compat import WINDOW
from baige_device.errors import MountError

__all__ = ["LEDGER", "hook", "swapped", "verify"]

HookKind = Literal["after", "around", "before", "replace"]
_ALL = WINDOW.accepted
_SRT = "sglang.srt"

LOAD_MODEL = f"{_SRT}.model_executor.model_runner:ModelRunner.load_model"
INTERNAL_STATE = f"{_SRT}.managers.scheduler:Scheduler.get_internal_state"
MOE_DISPATCHER = f"{_SRT}.layers.moe.fused_moe_triton.layer:create_moe_dispatcher"
MOE_CLASS = f"{_SRT}.layers.moe.ep_moe.layer:get_moe_impl_class"
CPU_COLLECTIVES = f"{_SRT}.distributed.parallel_state:_is_cpu"
CPU_PINNING = f"{_SRT}.model_executor.forward_batch_info:_is_cpu"
DP_MEMCPY = f"{_SRT}.layers.dp_attention:memcpy_func"
BITMASK_OF_REQUEST = f"{_SRT}.constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask"
BITMASK_OF_BACKEND = f"{_SRT}.constrained.xgrammar_backend:XGrammarGrammarBackend.apply_vocab_mask"
CAPABILITY = "torch.cuda:get_device_capability"

ATTENTION_REGISTRY = f"{_SRT}.layers.attention.attention_registry:register_attention_backend"
ATTENTION_CHOICES = f"{_SRT}.arg_groups.choices:add_attention_backend_choices"
MLA_HANDLERS = f"{_SRT}.models.deepseek_common.attention_backend_handler:AttentionBackendRegistry.register"
OOT_FORWARD = "sglang.kernels.fused_op:BaseFusedOp.register_oot_forward"
RESOLUTION_HOOK = f"{_SRT}.arg_groups.resolution_hooks:register_resolution_hook"
INDEX_KEYS = f"{_SRT}.mem_cache.memory_pool:DSATokenToKVPool._create_index_key_cache"
PLATFORM = f"{_SRT}.platforms.interface:SRTPlatform"
TRITON_STUB = "sglang._platform_stubs:install_platform_stubs"

_SWAP_MODULE = "sglang.kernels.ops.kvcache.hisparse"
_HOST_POOL = f"{_SRT}.mem_cache.pool_host.mla:MLATokenToKVPoolHost"
_KV_POOLS = f"{_SRT}.mem_cache.kv_cache_configurator"
HISPARSE_SWAPS = tuple(
    f"{_SWAP_MODULE}:{name}"
    for name in (
        "load_cache_to_device_buffer_mla",
        "load_cache_to_device_buffer_dsv4_mla",
        "load_cache_to_device_buffer_spec_mla",
        "load_blocks_to_device_buffer_mha",
        "copy_cache_planned_mla",
        "transfer_cache_dsv4_mla",
    )
)
_REFUSED_SWAP = HISPARSE_SWAPS[-1]
HISPARSE_BACKUP = f"{_HOST_POOL}.backup_from_device_all_layer"
HISPARSE_LOAD = f"{_HOST_POOL}.load_to_device_per_layer"
HISPARSE_DESTROY = f"{_HOST_POOL}.destroy"
HISPARSE_COORDINATOR = f"{_SRT}.model_executor.model_runner:ModelRunner.maybe_init_hisparse_coordinator"
HISPARSE_REFUSAL = f"{_KV_POOLS}:reject_out_of_tree_path"
HISPARSE_POOL = f"{_KV_POOLS}:HiSparseDSATokenToKVPool"
HISPARSE_CAPACITY = f"{_SRT}.mem_cache.allocator.hisparse:HiSparseTokenToKVPoolAllocator.check_decode_capacity"
HISPARSE_READY = f"{_SRT}.managers.hisparse_coordinator:HiSparseCoordinator.collect_ready_reqs"
HISPARSE_PINNING = f"{_SRT}.managers.hisparse_coordinator:torch"
HISPARSE_MEMORY = f"{_SRT}.mem_cache.pool_host.common:ALLOC_MEMORY_FUNCS"


def _seam(target: str, feature: str, why: str) -> Row:
    return Row(target, "seam", why, _ALL, feature=feature)


def _patch(target: str, feature: str, why: str, remove_when: str) -> Row:
    return Row(target, "patch", why, _ALL, remove_when, feature)


_NO_TRITON = "constrained decoding: masks are applied by a Triton kernel, which a chip without Triton cannot run"
_SWAP_WHY = "compiled for CUDA when it is first called; here hot_cache_resolve and uva_sparse_gather do its work"
_SWAP_END = "the swap-in functions are chosen by the platform"
_HOST_WHY = "host transfers of HiSparse's pool are CUDA kernels; here uva_sparse_gather and uva_sparse_scatter"
_HOST_END = "host pools are made and moved by the platform"
_ROOM_WHY = (
    "hot buffers start and grow without a check, and a full device pool ends the scheduler; requests wait instead"
)
_ROOM_END = "SGLang counts the growth of hot buffers"
_ASKS_TRITON = "the backend asks PlatformCapabilities.supports_triton"

LEDGER = Ledger(
    "sglang",
    WINDOW,
    (
        _seam(ATTENTION_REGISTRY, "names", "the attention backend `baige` (on our platform also `dsa`)"),
        _seam(ATTENTION_CHOICES, "names", "`--attention-backend baige`"),
        _seam(MLA_HANDLERS, "names", "absorbed MLA for prefill and decode with our backend"),
        _seam(PLATFORM, "platform", "base class of the out-of-tree platform"),
        _seam(
            RESOLUTION_HOOK,
            "platform",
            "handle_cpu_backends would force intel_amx; handle_model_specific_adjustments asks CUDA for the chip's "
            "capability and sets a KV dtype for DSA",
        ),
        _seam(OOT_FORWARD, "platform", "expert computation and the DSA indexer run through our ops"),
        _seam(INDEX_KEYS, "dsa", "index keys are kept unquantised in our DSA pool"),
        _seam(TRITON_STUB, "early", "SGLang's own triton stub, on hosts without triton (by baige_device_sglang.pth)"),
        _patch(
            LOAD_MODEL,
            "platform",
            "activation, before the layers are built: the first moment when model and process groups are known",
            "SRTPlatform gets a hook before the model is loaded",
        ),
        _patch(
            INTERNAL_STATE,
            "platform",
            "the activation record and the op counters appear in /server_info",
            "the scheduler's internal state can be contributed to",
        ),
        _patch(
            MOE_DISPATCHER,
            "moe",
            "tokens reach the experts by moe_dispatch and come back by moe_combine",
            "dispatchers get a registry, or the all-to-all backend `customized` can be chosen",
        ),
        _patch(
            MOE_CLASS,
            "moe",
            "the class for --moe-a2a-backend deepep asserts DeepEP's formats and ignores an out-of-tree forward",
            "DeepEPMoE is folded into FusedMoE (upstream calls it temporary)",
        ),
        _patch(
            CPU_COLLECTIVES,
            "cpu",
            "SGLang's collectives are custom ops of PrivateUse1 on every out-of-tree platform; tensors of type cpu do "
            "not reach them",
            "direct_register_custom_op asks the platform for its dispatch key",
        ),
        _patch(
            CPU_PINNING,
            "cpu",
            "data-parallel attention pins its token counts, which torch refuses without an accelerator",
            "it asks is_pin_memory_available like its neighbours",
        ),
        _patch(
            DP_MEMCPY,
            "cpu",
            "data-parallel attention copies by a triton kernel",
            "it asks PlatformCapabilities.supports_triton",
        ),
        _patch(
            CAPABILITY,
            "dsa",
            "asked while a DSA model's arguments are resolved, on every platform but npu and xpu; replaced only during "
            "that step and only where torch has no CUDA",
            "the step asks the platform",
        ),
        *(_patch(target, "hisparse", _SWAP_WHY, _SWAP_END) for target in HISPARSE_SWAPS if target != _REFUSED_SWAP),
        _patch(
            _REFUSED_SWAP,
            "hisparse",
            "copies between raw addresses, which no op of ours reads; refused in our words",
            _SWAP_END,
        ),
        _patch(HISPARSE_BACKUP, "hisparse", _HOST_WHY, _HOST_END),
        _patch(HISPARSE_LOAD, "hisparse", _HOST_WHY, _HOST_END),
        _patch(HISPARSE_DESTROY, "hisparse", "the host pool's memory is ours to free", _HOST_END),
        _patch(
            HISPARSE_COORDINATOR,
            "hisparse",
            "while SGLang makes its host pool, memory comes from host_alloc, within hisparse.host_gib_per_node",
            _HOST_END,
        ),
        _patch(
            HISPARSE_REFUSAL,
            "hisparse",
            "SGLang refuses HiSparse on out-of-tree platforms; lifted for the KV pool of DSA models only",
            "the HiSparse pool gets a platform seam",
        ),
        _patch(
            HISPARSE_POOL,
            "hisparse",
            "index keys are kept unquantised, and rows move without Triton",
            "get_kv_pool_cls is asked for the HiSparse pool, too",
        ),
        _patch(HISPARSE_CAPACITY, "hisparse", _ROOM_WHY, _ROOM_END),
        _patch(HISPARSE_READY, "hisparse", _ROOM_WHY, _ROOM_END),
        _patch(
            HISPARSE_PINNING,
            "hisparse_cpu",
            "the coordinator pins a list of indices, which torch refuses without an accelerator",
            "it asks is_pin_memory_available like its neighbours",
        ),
        _seam(
            HISPARSE_MEMORY, "hisparse_memory", "the allocator of host pools by device type, only during the row above"
        ),
        _patch(BITMASK_OF_REQUEST, "grammar", _NO_TRITON, _ASKS_TRITON),
        _patch(BITMASK_OF_BACKEND, "grammar", _NO_TRITON, _ASKS_TRITON),
    ),
)

_hooked: list[str] = []


def hook(target: str, function: Callable[..., Any], kind: HookKind) -> None:
    """Register a hook by SGLang's HookRegistry, once per process; SGLang applies it after all plugins ran.

    Raises:
        MountError: the target has no row or is missing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in LEDGER.applied:
        return
    original = LEDGER.resolve(target)[2]
    HookRegistry.register(_dotted(target), function, HookType(kind))
    LEDGER.applied[target] = original
    _hooked.append(target)


def verify(features: Sequence[str]) -> None:
    """Check that every row of these features is in force; for workers, because SGLang only logs a hook that fails.

    Raises:
        MountError: listing all rows that are not.
    """
    LEDGER.verify_applied(features)
    missing = [target for target in _hooked if LEDGER.resolve(target)[2] is LEDGER.applied[target]]
    if missing:
        raise MountError(f"sglang: hooks not applied: {', '.join(missing)}; see 'Failed to apply hooks' above")


@contextmanager
def swapped(target: str, value: object) -> Iterator[None]:
    """Replace a target for the duration of a block.

    Raises:
        MountError: the target has no row or is missing.
    """
    owner, name, original = LEDGER.resolve(target)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _dotted(target: str) -> str:
    return target.replace(":", ".")
