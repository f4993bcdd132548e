"""Vendor builds to emulate. Membership is a test fixture: public code documents it only in part."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PROFILES", "Profile"]


@dataclass(frozen=True)
class Profile:
    """One build: which modules and ops it has, and one reading of every open question."""

    name: str
    modules: frozenset[str] = frozenset({"torch_xmlir", "kunlun_ops", "xspeedgate_ops"})
    absent: frozenset[str] = field(default_factory=frozenset)
    """Ops that this build lacks, as `module.op`."""
    broken: tuple[tuple[str, str], ...] = ()
    """(module, message of the ImportError) of native libraries that do not load."""
    item_step_bytes: int = 1
    """Granularity of transfer_kv_per_layer_mla: item_size must be a multiple."""
    memcpy_takes_host: bool = True
    kv_lod: str = "ignored"
    """What kv_lod bounds in fwd_kvcache_mla: `ignored`, `row_ids` or `positions`."""
    window_counts_self: bool = False
    flash_skips_negative: bool = True
    moe_stable: bool = True
    deep_ep_order: str = "source"
    """Order of the rows that deep_ep's dispatch delivers: by `source` rank and token, or `token` first."""
    group_backend: str = ""
    """What process groups are called, when not by their real name; they then lack all_to_all_single."""
    register_status: int = 0
    """What cudaHostRegister returns."""


_NO_SPEED_29 = frozenset({"xspeedgate_ops.batch_memcpy", "xspeedgate_ops.gather_paged_scale"})

PROFILES: dict[str, Profile] = {
    item.name: item
    for item in (
        Profile("torch2.9"),
        Profile("torch2.5", absent=_NO_SPEED_29),
        Profile("bare", modules=frozenset({"torch_xmlir"})),
        Profile("legacy", modules=frozenset({"torch_xmlir", "xtorch_ops", "xspeedgate_ops"}), absent=_NO_SPEED_29),
        Profile("pages_only", absent=_NO_SPEED_29, item_step_bytes=64 * 1152),
        Profile("no_topk", absent=frozenset({"xspeedgate_ops.topk_per_row"})),
        Profile("deep_ep", modules=frozenset({"torch_xmlir", "kunlun_ops", "xspeedgate_ops", "deep_ep"})),
        Profile(
            "deep_ep_by_token",
            modules=frozenset({"torch_xmlir", "kunlun_ops", "xspeedgate_ops", "deep_ep"}),
            deep_ep_order="token",
        ),
        Profile("no_all_to_all", group_backend="other"),
        Profile("kv_lod_rows", kv_lod="row_ids"),
        Profile("kv_lod_positions", kv_lod="positions"),
    )
}
