"""The shape of one hot KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from baige_device.errors import SettingsError

__all__ = ["HiSparseConfig"]


@dataclass(frozen=True)
class HiSparseConfig:
    """Sizes that stay fixed for the life of a cache.

    Raises:
        SettingsError: a size that cannot work, at construction.
    """

    num_layers: int
    row_bytes: int
    """Bytes of one token's KV in one layer (656 for DeepSeek-V3.2's fp8 latent, 1152 for bf16)."""
    topk: int
    hot_tokens: int
    """Slots of the hot buffer of one request; at least `topk` (`plan_hisparse` proposes twice that)."""
    max_requests: int
    max_context_tokens: int
    host_tokens: int
    """Tokens of all requests together that the host pool of this rank holds."""
    page_tokens: int = 64
    layer_groups: tuple[int, ...] = field(default=())
    """Group of each layer; layers of a group share one indexer result, so the first one resolves for all. Empty: each
    layer is its own group."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "row_bytes", "topk", "max_requests", "max_context_tokens", "page_tokens"):
            if getattr(self, name) < 1:
                raise SettingsError(f"hisparse: {name}: expected >= 1, got {getattr(self, name)}")
        if self.hot_tokens < self.topk:
            raise SettingsError(f"hisparse: hot_tokens: expected >= topk = {self.topk}, got {self.hot_tokens}")
        if self.host_tokens < self.page_tokens:
            raise SettingsError(f"hisparse: host_tokens: expected >= {self.page_tokens}, got {self.host_tokens}")
        if self.layer_groups and len(self.layer_groups) != self.num_layers:
            raise SettingsError(
                f"hisparse: layer_groups: expected {self.num_layers} groups, one a layer, got {len(self.layer_groups)}"
            )

    @property
    def groups(self) -> tuple[int, ...]:
        """Group of each layer, numbered from 0 in order of appearance."""
        raw = self.layer_groups or tuple(range(self.num_layers))
        order = {group: index for index, group in enumerate(dict.fromkeys(raw))}
        return tuple(order[group] for group in raw)

    @property
    def host_pages(self) -> int:
        return self.host_tokens // self.page_tokens

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_context_tokens // self.page_tokens)
