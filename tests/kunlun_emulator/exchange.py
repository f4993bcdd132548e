"""`deep_ep.buffer_v2.BufferV2` in its normal mode, with the arguments that sglang-kunlun 0.1.0 passes, over gloo.

Only what its callers show is taken: int8 rows with one factor each, no layout of the caller's own, no events. Weights
of choices that are elsewhere, and combined rows of tokens that no rank answered, are not written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from kunlun_emulator.checks import contiguous, dtype, expect, kernel, shape
from kunlun_emulator.state import STATE
from torch import Tensor

__all__ = ["BufferV2"]


class Config:
    """Sizes a buffer. The factor is the emulator's own."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks * 8

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class _Handle(NamedTuple):
    buffer: Any
    origin: list[tuple[int, int]]
    """(source rank, token) of each received row."""
    tokens: int


class BufferV2:
    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_mnnvl: bool = False,
        num_experts: int = -1,
    ) -> None:
        expect(not low_latency_mode, "BufferV2", "only the normal mode is emulated")
        expect(num_experts > 0 and num_experts % group.size() == 0, "BufferV2", f"num_experts {num_experts}")
        self.group, self.num_nvl_bytes, self.num_experts = group, num_nvl_bytes, num_experts
        self.group_size = group.size()

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(ranks: int) -> Config:
        return Config()

    def _room(self, op: str, row_bytes: int) -> None:
        needed = Config().get_nvl_buffer_size_hint(row_bytes, self.group_size)
        expect(self.num_nvl_bytes >= needed, op, f"num_nvl_bytes {self.num_nvl_bytes} are less than {needed}")

    @kernel
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        expert_alignment: int = 1,
        config: Any = None,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, list[int], _Handle, Any]:
        op = "dispatch"
        expect(isinstance(x, tuple) and len(x) == 2, op, "x is not (int8 rows, absmax)")
        rows, factors = x
        dtype(op, torch.int8, x=rows)
        dtype(op, torch.float32, absmax=factors, topk_weights=topk_weights)
        dtype(op, torch.int32, topk_idx=topk_idx)
        shape(op, "absmax", factors, rows.shape[0], 1)
        shape(op, "topk_idx", topk_idx, rows.shape[0], -1)
        shape(op, "topk_weights", topk_weights, *topk_idx.shape)
        contiguous(op, x=rows, absmax=factors, topk_idx=topk_idx, topk_weights=topk_weights)
        layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert)
        expect(all(item is None for item in layout), op, "the port works its layout out itself")
        expect(expert_alignment == 128, op, f"expert_alignment {expert_alignment}, not 128")
        expect(bool(((topk_idx >= -1) & (topk_idx < self.num_experts)).all()), op, "expert ids out of range")
        self._room(op, rows.shape[1])
        world: list[Any] = [None] * self.group_size
        dist.all_gather_object(world, (rows, factors, topk_idx, topk_weights), group=self.group)
        local = self.num_experts // self.group_size
        first = dist.get_rank(self.group) * local
        origin = [
            (source, token)
            for source, (_, _, ids, _) in enumerate(world)
            for token, chosen in enumerate(ids.tolist())
            if any(first <= expert < first + local for expert in chosen)
        ]
        if STATE.profile.deep_ep_order == "token":
            origin.sort(key=lambda at: (at[1], at[0]))
        parts = []
        for column, empty in enumerate((rows[:0], factors[:0], topk_idx[:0], topk_weights[:0])):
            picked = [world[source][column][token : token + 1] for source, token in origin]
            parts.append(torch.cat([empty, *picked]))
        here = (parts[2] >= first) & (parts[2] < first + local)
        ids = torch.where(here, parts[2] - first, -1)
        counts = [-(-int((ids == expert).sum()) // 128) * 128 for expert in range(local)]
        weights = torch.where(here, parts[3], float("nan"))
        return (parts[0], parts[1]), ids, weights, counts, _Handle(self, origin, rows.shape[0]), None

    @kernel
    def combine(
        self,
        x: Tensor,
        handle: _Handle,
        async_finish: bool = False,
        previous_event: Any = None,
        allocate_on_comm_stream: bool = False,
        config: Any = None,
    ) -> tuple[Tensor, None, Any]:
        op = "combine"
        dtype(op, torch.bfloat16, x=x)
        shape(op, "x", x, len(handle.origin), -1)
        contiguous(op, x=x)
        expect(handle.buffer is self, op, "the handle belongs to another buffer")
        self._room(op, 2 * x.shape[1])
        world: list[Any] = [None] * self.group_size
        dist.all_gather_object(world, (x, handle.origin), group=self.group)
        out = torch.full((handle.tokens, x.shape[1]), float("nan"))
        me = dist.get_rank(self.group)
        for rows, origin in world:
            for row, (source, token) in zip(rows.float(), origin, strict=True):
                if source == me:
                    out[token] = row if out[token].isnan().all() else out[token] + row
        return out.to(torch.bfloat16), None, None
