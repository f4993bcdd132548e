"""Every seam that this mount uses in vLLM, and every attribute that it replaces."""

from __future__ import annotations

from baige_device.engines.ledger import Ledger, Row
from baige_device.engines.vllm.compat import CUDA_WINDOW, HISPARSE_WINDOW, WINDOW

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

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

_HISPARSE_ROWS = (
    Row(
        f"{_RUNNER}.get_kv_cache_spec",
        "seam",
        "sparse layers leave the host's KV specs: their rows live on the host, under the blocks of the index keys",
        HISPARSE_WINDOW,
        feature="hisparse",
    ),
    Row(
        f"{_RUNNER}.maybe_add_kv_sharing_layers_to_kv_cache_groups",
        "seam",
        "sparse layers are entered as sharing the index keys' blocks, so that they get metadata and slot mappings",
        HISPARSE_WINDOW,
        feature="hisparse",
    ),
    Row(
        f"{_RUNNER}.initialize_kv_cache_tensors",
        "seam",
        "host pool, hot buffers and staging are made for the host's final number of blocks",
        HISPARSE_WINDOW,
        feature="hisparse",
    ),
    Row(
        f"{_RUNNER}.execute_model",
        "seam",
        "hot rows of finished, aborted, preempted and resumed requests",
        HISPARSE_WINDOW,
        feature="hisparse",
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

_HOST_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker:HiSparseConnectorWorker"
_DATA_PLANE = "the host makes HiSparse's data plane a choice of the platform"

_CUDA_ROWS = (
    Row(
        "vllm.config.vllm:VllmConfig.__post_init__",
        "patch",
        "hisparse.host_gib_per_node becomes vLLM's own HiSparse options",
        CUDA_WINDOW,
        "the host lets a plugin complete its configuration on NVIDIA's platform",
        feature="cuda",
    ),
    Row(
        "vllm.v1.hisparse.runtime:HiSparseRuntime.swap_in",
        "patch",
        "HiSparse on NVIDIA: lookup and copy through hot_cache_resolve and uva_sparse_gather, without side streams",
        CUDA_WINDOW,
        _DATA_PLANE,
        feature="cuda",
    ),
    Row(
        f"{_HOST_WORKER}._stage_row_mirror_mapping",
        "patch",
        "decode steps need no slot mapping on the host, which waits for it",
        CUDA_WINDOW,
        _DATA_PLANE,
        feature="cuda",
    ),
    Row(
        f"{_HOST_WORKER}.prepare_forward",
        "patch",
        "steps with prompt tokens fetch the slot mapping that was put off",
        CUDA_WINDOW,
        _DATA_PLANE,
        feature="cuda",
    ),
    Row(
        f"{_HOST_WORKER}._finish_mirror_phase",
        "patch",
        "rows of a decode step go to the host through uva_sparse_scatter",
        CUDA_WINDOW,
        _DATA_PLANE,
        feature="cuda",
    ),
    Row(
        "vllm.v1.hisparse.runtime:HiSparseHostPool.allocate",
        "patch",
        "HiSparse's host pool is memory of host_alloc, which the device reads through large pages",
        CUDA_WINDOW,
        "the host lets its host pools' memory be chosen",
        feature="cuda",
    ),
    *(
        Row(
            f"{module}:release_pinned_state",
            "patch",
            "the host unregisters its pool's memory, and ours was not registered by it",
            CUDA_WINDOW,
            "the host lets its host pools' memory be chosen",
            feature="cuda",
        )
        for module in ("vllm.v1.hisparse.binding", _HOST_WORKER.partition(":")[0])
    ),
    Row(
        "vllm.v1.hisparse.runtime:HiSparseRuntime.gather_prefill_cache",
        "patch",
        "rows of a prefill through uva_sparse_gather: the host's kernel refuses managed memory",
        CUDA_WINDOW,
        "the host's kernels take managed memory",
        feature="cuda",
    ),
    Row(
        "vllm._custom_ops:cp_gather_and_upconvert_fp8_kv_cache",
        "patch",
        "host rows of a prefill are staged on the device first: the host's kernel refuses managed memory",
        CUDA_WINDOW,
        "the host's kernels take managed memory",
        feature="cuda",
    ),
    Row(
        "vllm._custom_ops:swap_blocks_batch",
        "patch",
        "copies to managed memory by the host's Triton kernel: the driver's batched copies of it run at a fifth",
        CUDA_WINDOW,
        "the driver copies managed memory at the link's rate",
        feature="cuda",
    ),
    Row(
        "vllm.v1.kv_offload.cpu.swap_blocks_triton:_swap_blocks_kernel",
        "seam",
        "the host's Triton copy between addresses, for managed memory",
        CUDA_WINDOW,
        feature="cuda",
    ),
    Row(
        "vllm.v1.hisparse.runtime:_MIN_STAGED_PREFILL_KV_ROWS",
        "seam",
        "the least rows that the host stages for a prefill",
        CUDA_WINDOW,
        feature="cuda",
    ),
    Row(
        "vllm.models.deepseek_v32.attention:sparse_attn_indexer",
        "patch",
        "index_topk on NVIDIA, when its tier is named",
        CUDA_WINDOW,
        "the host makes the indexer's kernels a choice of the platform",
        feature="cuda",
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
        *_HISPARSE_ROWS,
        *_CUDA_ROWS,
    ),
)
