"""Everything that is particular to a version of SGLang: the window, and what is looked up before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baige_device.engines.versions import HostWindow
from baige_device.errors import MountError

if TYPE_CHECKING:
    from torch import Tensor

    from baige_device.settings import Settings

__all__ = [
    "KV_POOLS",
    "WINDOW",
    "attention_is_ours",
    "cpu_group",
    "engine_label",
    "host_rank",
    "kv_pool_kind",
    "resolved",
    "split_cores",
    "window_tokens",
    "write_slots",
]

WINDOW = HostWindow("sglang", ">=0.5.22,<0.6")
KV_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool")
"""Pools whose rows are addressed by slot; hybrid pools (sliding window, Mamba) keep several and translate slots."""


def engine_label() -> str:
    """`sglang 0.5.23`, for the activation record."""
    return f"sglang {WINDOW.installed()}"


def kv_pool_kind(pool: object) -> str:
    """`mha` or `mla`.

    Raises:
        MountError: a pool of another kind, or one whose layout is not `[slot, head, dim]`.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if isinstance(pool, MLATokenToKVPool):
        return "mla"
    if isinstance(pool, MHATokenToKVPool):
        layout = getattr(pool, "kv_cache_layout", "nhd")
        if layout == "nhd":
            return "mha"
        raise MountError(f"sglang: KV cache layout: expected nhd, got {layout!r}; drop the layout option")
    raise MountError(
        f"sglang: KV pool: expected one of {', '.join(KV_POOLS)}, got {type(pool).__name__}; choose another "
        "--attention-backend for this model"
    )


def window_tokens(layer: Any) -> int:
    """Visible tokens of a sliding-window layer, 0 without a window. SGLang counts the tokens before the query's own."""
    size = layer.sliding_window_size
    return 0 if size is None or size < 0 else int(size) + 1


def resolved(server_args: Any) -> Any:
    """A view of the server arguments with every decision taken so far."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def host_rank() -> int:
    """Rank of this process among all workers, those of data-parallel replicas (a world of ranks each) included."""
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.runtime_context import get_parallel

    parallel, world = get_parallel(), get_world_group()
    replica = int(parallel.dp_rank or 0) if parallel.dp_size > 1 else 0
    return replica * int(world.world_size) + int(world.rank_in_group)


def cpu_group() -> Any:
    """The group over which the workers compare their records."""
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group


def write_slots(out_cache_loc: Tensor) -> Tensor:
    """The slots for `kv_write`: SGLang sends padded tokens to its dummy slot 0, many times; the op has -1 for them."""
    return out_cache_loc.masked_fill(out_cache_loc == 0, -1)


def attention_is_ours(settings: Settings) -> bool:
    """False when the user leaves dense attention or the cache writes to SGLang."""
    return all(settings.ops.get(op) != "off" for op in ("attend_paged", "kv_write"))


def split_cores(cores: list[int], ranks: int) -> str:
    """`0,1|2,3`: the cores of each rank; ranks share cores when there are too few."""
    share = max(1, len(cores) // ranks)
    groups = [[cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)
