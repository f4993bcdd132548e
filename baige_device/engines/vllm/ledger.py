"""Every seam that this mount uses in vLLM, and every attribute that it replaces."""

from __future__ import annotations

from baige_device.engines.ledger import Ledger, Row
from baige_device.engines.vllm.compat import WINDOW

__all__ = ["BITMASK", "LEDGER"]

BITMASK = "xgrammar:apply_token_bitmask_inplace"

_ALL = WINDOW.accepted

_PLATFORM_ROWS = (
    Row(
        "vllm.platforms.interface:Platform",
        "seam",
        "the platform of the reference, Kunlun and host-tensor chips, by the entry point group vllm.platform_plugins",
        _ALL,
        feature="platform",
    ),
    Row(
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        "seam",
        "the host's worker initialises CUDA devices only",
        _ALL,
        feature="platform",
    ),
    Row(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        "seam",
        "the model runner without accelerator calls",
        _ALL,
        feature="cpu",
    ),
    Row(
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
        "seam",
        "collectives of host tensors; the host's class lacks all_gatherv and reduce_scatterv",
        _ALL,
        feature="cpu",
    ),
    Row(
        "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel",
        "seam",
        "the slot mapping is a Triton kernel; replaced through the host's kernel registry",
        ">=0.31,<0.34",
        feature="platform",
    ),
    Row(
        "torch:accelerator.empty_cache",
        "patch",
        "the host calls it at shutdown, where it raises on a machine without accelerator",
        _ALL,
        "the host asks whether there is an accelerator",
        feature="cpu",
    ),
    Row(
        "torch:accelerator.empty_host_cache",
        "patch",
        "the host calls it at shutdown, where it raises on a machine without accelerator",
        _ALL,
        "the host asks whether there is an accelerator",
        feature="cpu",
    ),
)

_MOE_ROWS = (
    Row(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.register_oot",
        "seam",
        "experts, dispatch and combine through moe_expert_ffn, moe_dispatch and moe_combine",
        _ALL,
        feature="moe",
    ),
    Row(
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEPrepareAndFinalizeModular",
        "seam",
        "where the host hands tokens to dispatch and takes them from combine",
        _ALL,
        feature="moe",
    ),
)

_INDEXER = "vllm.model_executor.models.deepseek_v2"
_WIDER = "the host makes layout and backend of the index cache a choice of the platform"

_DSA_ROWS = (
    Row(
        f"{_INDEXER}:DeepseekV32IndexerCache.get_attn_backend",
        "patch",
        "the index cache is bound to a backend that exists on CUDA only",
        _ALL,
        _WIDER,
        feature="dsa",
    ),
    Row(
        f"{_INDEXER}:DeepseekV32IndexerCache.get_kv_cache_spec",
        "patch",
        "the index cache is bound to the fp8 layout of the CUDA kernels",
        _ALL,
        _WIDER,
        feature="dsa",
    ),
    Row(
        f"{_INDEXER}:Indexer.forward",
        "patch",
        "index keys and the top-k through kv_write and index_topk, without the fp8 quantisation of the CUDA path",
        _ALL,
        "the host's SparseAttnIndexer takes unquantised queries",
        feature="dsa",
    ),
)

_GRAMMAR_ROWS = (
    Row(
        BITMASK,
        "patch",
        "structured output: for device logits the host calls kernels of xgrammar that need Triton or a JIT compiler",
        _ALL,
        "the host lets the platform choose xgrammar's backend",
        feature="grammar",
    ),
)

LEDGER = Ledger(
    "vllm",
    WINDOW,
    (
        Row(
            "vllm.v1.attention.backends.registry:register_backend",
            "seam",
            "our attention backends by name",
            _ALL,
        ),
        *_PLATFORM_ROWS,
        *_MOE_ROWS,
        *_DSA_ROWS,
        *_GRAMMAR_ROWS,
    ),
)
