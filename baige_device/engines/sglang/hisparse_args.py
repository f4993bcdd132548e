"""Our HiSparse settings and SGLang's flags, brought into agreement before SGLang checks its flags.

`--enable-hisparse` and `--hisparse-config` are the user's switches; `hisparse.host_gib_per_node` and
`hisparse.hot_tokens` say the same in our words. What one side leaves open the other fills; a contradiction is refused.
"""

from __future__ import annotations

import json
from typing import Any

from baige_device.errors import SettingsError
from baige_device.optimizations.hisparse.setup import INT16_SLOTS, choose_hot_tokens
from baige_device.settings import HiSparseSettings

__all__ = ["agree", "ranks_per_node"]

_GIB = 1 << 30
_PAGE_TOKENS = 64
"""Of every DSA pool in SGLang."""


def agree(settings: HiSparseSettings, server_args: Any, model: Any) -> dict[str, Any]:
    """The values of SGLang's arguments that switch HiSparse on when the settings ask for it, complete; {} without it.

    Args:
        server_args: as decided so far. model: SGLang's model configuration.
    Raises:
        SettingsError: a contradiction between both, or sizes that cannot work, with the numbers.
    """
    if not settings.enabled and not server_args.enable_hisparse:
        if settings.hot_tokens or settings.overlap:
            raise SettingsError(
                "hisparse.hot_tokens and hisparse.overlap do nothing without HiSparse; add --enable-hisparse or set "
                "hisparse.host_gib_per_node"
            )
        return {}
    topk = getattr(model.hf_text_config, "index_topk", None)
    if topk is None:
        return {"enable_hisparse": True}  # SGLang refuses a model without DSA in its own words
    config = json.loads(server_args.hisparse_config or "{}")
    config.setdefault("top_k", int(topk))
    _agree_on_hot_tokens(settings, config, int(topk))
    if settings.enabled:
        _agree_on_host(settings, config, server_args, model)
    return {"enable_hisparse": True, "hisparse_config": json.dumps(config)}


def _agree_on_hot_tokens(settings: HiSparseSettings, config: dict[str, Any], topk: int) -> None:
    given = config.get("device_buffer_size")
    if given is not None and settings.hot_tokens not in (0, given):
        raise SettingsError(
            f"hisparse.hot_tokens={settings.hot_tokens} and device_buffer_size={given} of --hisparse-config say two "
            "things; give one of them"
        )
    chosen = settings if given is None else settings.model_copy(update={"hot_tokens": given})
    wanted = choose_hot_tokens(chosen, topk, most_slots=INT16_SLOTS)
    if wanted % _PAGE_TOKENS:
        raise SettingsError(
            f"hisparse.hot_tokens (device_buffer_size): expected a multiple of SGLang's page of {_PAGE_TOKENS} tokens, "
            f"got {wanted}"
        )
    config["device_buffer_size"] = wanted


def _agree_on_host(settings: HiSparseSettings, config: dict[str, Any], server_args: Any, model: Any) -> None:
    if "host_to_device_ratio" in config:
        return  # the host pool is checked against the setting when it is allocated
    tokens = server_args.max_total_tokens
    if not tokens:
        raise SettingsError(
            f"hisparse.host_gib_per_node={settings.host_gib_per_node:g}: the ratio of host to device tokens follows "
            "from --max-total-tokens, which is not given; give it, or --hisparse-config '{\"host_to_device_ratio\": N}'"
        )
    budget = int(settings.host_gib_per_node * _GIB) // ranks_per_node(server_args)
    token_bytes = _token_bytes(server_args, model)
    ratio = (budget // token_bytes - _PAGE_TOKENS) // tokens  # SGLang adds a page
    if ratio < 1:
        raise SettingsError(
            f"hisparse.host_gib_per_node={settings.host_gib_per_node:g}: {budget} bytes a rank / {token_bytes} bytes a "
            f"token hold {budget // token_bytes} tokens, and --max-total-tokens {tokens} are on the device; give more "
            "host memory or lower --max-total-tokens"
        )
    config["host_to_device_ratio"] = ratio


def _token_bytes(server_args: Any, model: Any) -> int:
    """Host bytes of one token on a rank: its latent rows in all layers of the largest pipeline stage."""
    import torch

    dtypes = {"auto": model.dtype, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    if server_args.kv_cache_dtype not in dtypes:
        raise SettingsError(
            f"hisparse.host_gib_per_node: --kv-cache-dtype: expected auto or bfloat16, got {server_args.kv_cache_dtype}"
        )
    layers = -(-int(model.num_hidden_layers) // server_args.pp_size)
    row: int = (model.kv_lora_rank + model.qk_rope_head_dim) * dtypes[server_args.kv_cache_dtype].itemsize
    return layers * row


def ranks_per_node(server_args: Any) -> int:
    """Ranks that share a node's memory, the data-parallel replicas' included."""
    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    return max(1, server_args.tp_size * server_args.pp_size * replicas // server_args.nnodes)
