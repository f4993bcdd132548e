"""How large, and does it pay: the arithmetic of HiSparse, pure and explainable."""

from __future__ import annotations

from dataclasses import dataclass

from baige_device.errors import SettingsError

__all__ = ["HiSparseFacts", "HiSparsePlan", "plan_hisparse"]

_GIB = 1 << 30


@dataclass(frozen=True)
class HiSparseFacts:
    """What the decision depends on."""

    num_layers: int
    row_bytes: int
    index_row_bytes: int
    """Bytes of the indexer's key of one token and layer; they stay on the device."""
    topk: int
    context_tokens: int
    device_kv_bytes: int
    """Device memory that KV may take."""
    host_gib_per_node: float
    local_ranks: int
    hit_rate: float = 0.9
    """Expected share of the top-k that is in the hot buffer."""
    link_bytes_per_s: float = 45e9
    """From the offer of `uva_sparse_gather` where it states one; the default is cautious for PCIe gen5 x16."""


@dataclass(frozen=True)
class HiSparsePlan:
    """The sizes, and the batch with and without."""

    hot_tokens: int
    host_tokens: int
    batch_without: int
    batch_device: int
    batch_host: int
    swap_us_per_layer: float
    """Transfer time of one layer's misses at the planned batch, if nothing is hidden."""
    lines: tuple[str, ...]

    @property
    def batch_with(self) -> int:
        return min(self.batch_device, self.batch_host)

    @property
    def pays(self) -> bool:
        """Whether the batch grows at all."""
        return self.batch_with > self.batch_without

    def explain(self) -> str:
        """The arithmetic, one line a step."""
        return "\n".join(self.lines)


def plan_hisparse(facts: HiSparseFacts, hot_tokens: int = 0) -> HiSparsePlan:
    """Size the hot buffer and the host pool of one rank; `hot_tokens` 0 means twice the top-k.

    `host_gib_per_node` is split over the node's ranks.

    Raises:
        SettingsError: a fact out of range, or a hot buffer smaller than the top-k.
    """
    _check(facts)
    hot = hot_tokens or 2 * facts.topk
    if hot < facts.topk:
        raise SettingsError(f"hisparse: hot_tokens: expected >= topk = {facts.topk}, got {hot}")
    layers, context = facts.num_layers, facts.context_tokens
    token_bytes, index_bytes = layers * facts.row_bytes, layers * facts.index_row_bytes
    full_bytes = context * (token_bytes + index_bytes)
    kept_bytes = min(hot, context) * token_bytes + context * index_bytes
    host_bytes = int(facts.host_gib_per_node * _GIB) // facts.local_ranks
    host_tokens = host_bytes // token_bytes
    without, on_device = facts.device_kv_bytes // full_bytes, facts.device_kv_bytes // kept_bytes
    in_host = host_tokens // context
    batch = min(on_device, in_host)
    missed = batch * min(facts.topk, context) * (1 - facts.hit_rate)
    swap_us = missed * facts.row_bytes / facts.link_bytes_per_s * 1e6
    lines = (
        f"a request of {context} tokens: {full_bytes / _GIB:.3f} GiB on the device without HiSparse, "
        f"{kept_bytes / _GIB:.3f} GiB with ({hot} hot tokens, indexer keys of all)",
        f"batch without: {facts.device_kv_bytes / _GIB:.1f} GiB / {full_bytes / _GIB:.3f} = {without}",
        f"batch by device: {facts.device_kv_bytes / _GIB:.1f} GiB / {kept_bytes / _GIB:.3f} = {on_device}",
        f"host pool: {facts.host_gib_per_node:g} GiB a node / {facts.local_ranks} ranks = "
        f"{host_bytes / _GIB:.1f} GiB a rank = {host_tokens} tokens, batch by host: {in_host}",
        f"batch with: min({on_device}, {in_host}) = {batch}; "
        f"swap at {facts.hit_rate:.0%} hits: {swap_us:.0f} us a layer",
    )
    return HiSparsePlan(hot, host_tokens, without, on_device, in_host, swap_us, lines)


def _check(facts: HiSparseFacts) -> None:
    for name in ("num_layers", "row_bytes", "topk", "context_tokens", "local_ranks"):
        if getattr(facts, name) < 1:
            raise SettingsError(f"hisparse: {name}: expected >= 1, got {getattr(facts, name)}")
    if not 0 <= facts.hit_rate <= 1:
        raise SettingsError(f"hisparse: hit_rate: expected 0 to 1, got {facts.hit_rate}")
    if facts.host_gib_per_node <= 0 or facts.link_bytes_per_s <= 0 or facts.device_kv_bytes < 0:
        raise SettingsError("hisparse: host_gib_per_node, link_bytes_per_s, device_kv_bytes: expected positive numbers")
