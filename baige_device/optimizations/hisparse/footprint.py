"""Device memory that HiSparse takes for a fixed configuration, so that an engine can subtract it from its KV budget."""

from __future__ import annotations

from dataclasses import dataclass

from baige_device.errors import SettingsError
from baige_device.optimizations.hisparse.config import HiSparseConfig

__all__ = ["Footprint", "footprint"]


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device, part by part."""

    hot_bytes: int
    """Hot buffers: requests x hot tokens x layers x row bytes."""
    state_bytes: int
    """Which token is in which slot, eviction order, block tables."""
    staging_bytes: int
    """Workspace of prompt chunks that attend over host rows."""

    @property
    def total_bytes(self) -> int:
        return self.hot_bytes + self.state_bytes + self.staging_bytes

    def explain(self) -> str:
        """One line with the parts in MiB."""
        parts = (self.hot_bytes, self.state_bytes, self.staging_bytes, self.total_bytes)
        hot, state, staging, total = (f"{part / (1 << 20):.1f}" for part in parts)
        return f"device: hot buffers {hot} + residency state {state} + prompt staging {staging} = {total} MiB"


def footprint(config: HiSparseConfig, staged_tokens: int) -> Footprint:
    """Bytes of a `HotKVCache` of this configuration and a `Staging` of `staged_tokens` rows.

    Raises:
        SettingsError: fewer staged tokens than one query's top-k.
    """
    if staged_tokens < config.topk:
        raise SettingsError(f"hisparse: staged tokens: expected >= topk = {config.topk}, got {staged_tokens}")
    order_bytes = 2 if config.hot_tokens <= 1 << 15 else 4
    slots = len(set(config.groups)) * (config.max_requests + 1) * config.hot_tokens
    return Footprint(
        hot_bytes=config.num_layers * config.max_requests * config.hot_tokens * config.row_bytes,
        state_bytes=slots * (4 + order_bytes) + (config.max_requests + 1) * config.pages_per_request * 8,
        staging_bytes=staged_tokens * config.row_bytes,
    )
