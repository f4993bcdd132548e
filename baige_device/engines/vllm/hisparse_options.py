"""When HiSparse is on, what it cannot be combined with, and on our platform vLLM's own HiSparse options as ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from baige_device.engines.vllm.compat import HISPARSE_WINDOW, WINDOW
from baige_device.engines.vllm.options import engine_settings
from baige_device.errors import MountError, SettingsError
from baige_device.optimizations.hisparse.setup import choose_hot_tokens

__all__ = [
    "CONNECTOR",
    "adopt_host_options",
    "decode_tokens",
    "hisparse_on",
    "hot_tokens",
    "refuse",
    "refuse_unserved",
    "split_sizes",
]

logger = logging.getLogger("baige_device")

CONNECTOR = "HiSparseConnector"
"""vLLM's own HiSparse, by the name of its KV connector."""
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Speculative methods that bring no attention layers along; only those can be verified over a hot buffer here."""


def hisparse_on(vllm_config: Any) -> bool:
    """Whether `hisparse.host_gib_per_node` gives HiSparse any memory."""
    return engine_settings(vllm_config).hisparse.enabled


def decode_tokens(vllm_config: Any) -> int:
    """The most tokens of one request that a decode step brings: one, and the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def hot_tokens(vllm_config: Any, most_slots: int = 0) -> int:
    """Slots of a request's hot buffer; `most_slots` bounds them, 0 does not.

    Raises:
        SettingsError: fewer than the tokens of a decode step may want, or more than the bound.
    """
    topk = int(vllm_config.model_config.hf_text_config.index_topk)
    settings = engine_settings(vllm_config).hisparse
    return choose_hot_tokens(settings, topk, tokens_per_step=decode_tokens(vllm_config), most_slots=most_slots)


def refuse_unserved(vllm_config: Any) -> None:
    """Stop the start where HiSparse is on and something else cannot go along with it.

    Raises:
        MountError: with every reason. SettingsError: a hot buffer that is too small.
    """
    if not hisparse_on(vllm_config):
        return
    refuse(_reasons(vllm_config))
    hot_tokens(vllm_config)


def refuse(reasons: Iterable[str]) -> None:
    """Stop a start for which HiSparse is on and that it cannot serve, if there is a reason.

    Raises:
        MountError: with every reason.
    """
    found = "; ".join(reasons)
    if found:
        raise MountError(
            f"vllm: hisparse.host_gib_per_node is set and HiSparse cannot serve this start: {found}; "
            "change that, or leave hisparse.host_gib_per_node at 0"
        )


def split_sizes(parallel_config: Any, *names: str) -> Iterator[str]:
    """A reason for each of these sizes of vLLM's that is more than 1."""
    for name in names:
        if getattr(parallel_config, name, 1) > 1:
            yield f"{name}: expected 1, got {getattr(parallel_config, name)}"


def _reasons(vllm_config: Any) -> Iterator[str]:
    cache = vllm_config.cache_config
    if not WINDOW.row_applies(HISPARSE_WINDOW):
        yield f"vLLM {WINDOW.installed()}: expected {HISPARSE_WINDOW}"
    model = vllm_config.model_config
    if not (model.use_mla and hasattr(model.hf_text_config, "index_topk")):
        yield f"model {model.model}: expected a DSA model (MLA with index_topk)"
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    yield from split_sizes(vllm_config.parallel_config, *sizes)
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype: expected auto (the model's {model.dtype}), got {cache.cache_dtype}"
    if vllm_config.kv_transfer_config is not None:
        yield f"--kv-transfer-config: expected none, got {vllm_config.kv_transfer_config.kv_connector}"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _WITHOUT_LAYERS:
        known = ", ".join(_WITHOUT_LAYERS)
        yield f"speculative method: expected one without layers ({known}), got {speculative.method}"


def adopt_host_options(vllm_config: Any) -> None:
    """Take vLLM's own HiSparse options as ours, before its gate, which admits NVIDIA alone, looks at them.

    `attention_config.hisparse_config.device_buffer_size` is `hisparse.hot_tokens`, and `host_pool_gib` of a
    `HiSparseConnector` is `hisparse.host_gib_per_node`; settings of ours win.

    Raises:
        SettingsError: HiSparse is asked for without a host pool size.
    """
    native = getattr(vllm_config.attention_config, "hisparse_config", None)
    transfer = vllm_config.kv_transfer_config
    connector = transfer is not None and transfer.kv_connector == CONNECTOR
    if native is None and not connector:
        return
    ours = engine_settings(vllm_config).hisparse
    asked: dict[str, Any] = {}
    if native is not None and native.device_buffer_size and not ours.hot_tokens:
        asked["hot_tokens"] = native.device_buffer_size
    if connector and not ours.enabled:
        asked["host_gib_per_node"] = float(transfer.kv_connector_extra_config.get("host_pool_gib") or 0)
    if not ours.enabled and not asked.get("host_gib_per_node"):
        raise SettingsError(
            "vllm: attention_config.hisparse_config: on this platform baige-device serves HiSparse and needs the size "
            'of the host pool: --additional-config \'{"baige": {"hisparse": {"host_gib_per_node": N}}}\', or '
            "BAIGE_HISPARSE__HOST_GIB_PER_NODE=N"
        )
    _give(vllm_config, asked)
    vllm_config.attention_config.hisparse_config = None
    if connector:
        vllm_config.kv_transfer_config = None
    logger.info("vLLM's HiSparse options are served by baige-device: %s", engine_settings(vllm_config).hisparse)


def _give(vllm_config: Any, asked: dict[str, Any]) -> None:
    if not asked:
        return
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping):
        raise SettingsError(f"--additional-config: expected an object, got {type(additional).__name__}")
    baige = dict(additional.get("baige", {}))
    baige["hisparse"] = {**baige.get("hisparse", {}), **asked}
    vllm_config.additional_config = {**additional, "baige": baige}
