"""Prompt chunks over host-resident context: the rows that the indexer chose are staged on the device and attended."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baige_device.errors import ContractError
from baige_device.registry.table import OpTable

__all__ = ["Staging"]


class Staging:
    """A bounded workspace on the device, shared by all layers and requests one after another.

    A chunk brings its own rows along; of the tokens before it, those that any of its queries wants cross the link once.
    Where they might not fit, the queries are served in pieces of `free rows / topk`.
    """

    def __init__(self, ops: OpTable, tokens: int, row_bytes: int, device: torch.device) -> None:
        self._ops = ops
        self._rows = torch.zeros(tokens, row_bytes, dtype=torch.uint8, device=device)

    def attend(
        self, host: Tensor, host_rows: Tensor, q: Tensor, own: Tensor, topk: Tensor, *, scale: float, v_dim: int
    ) -> Tensor:
        """MLA attention of one request's chunk; returns `[T, H, v_dim]`.

        Args:
            host: the layer's host rows, uint8 `[S, row_bytes]`.
            host_rows: int64 `[B]`: those of the request's tokens before the chunk, complete.
            q: `[T, H, D]`. own: the chunk's own rows, uint8 `[T, row_bytes]`.
            topk: int32 `[T, K]`, wanted positions within the request, -1 padding.
        Raises:
            ContractError: the workspace cannot hold the chunk and one query's top-k.
        No host synchronisation of its own.
        """
        before, (count, width) = host_rows.shape[0], topk.shape
        room = self._rows.shape[0] - count
        if room < min(before, width):
            raise ContractError(
                "hisparse staging", "own.shape[0]", f"<= {self._rows.shape[0] - width} rows", str(count)
            )
        self._rows[:count] = own
        out = q.new_empty(*q.shape[:2], v_dim)
        piece = count if before <= room else max(1, room // width)
        for part in _parts(count, piece):
            rows = self._stage(host, host_rows, topk[part], count)
            pool = self._rows.view(q.dtype)[:, None]
            out[part] = self._ops.sparse_attention(q[part], pool, None, rows[:, None], scale=scale, v_dim=v_dim)[0]
        return out

    def _stage(self, host: Tensor, host_rows: Tensor, topk: Tensor, own: int) -> Tensor:
        """Bring the wanted rows in behind the chunk's own; int32 `[t, K]` rows of the workspace, -1 padding."""
        before = host_rows.shape[0]
        if before == 0:
            return topk
        at = topk.long()
        earlier = (at >= 0) & (at < before)
        wanted = torch.zeros(before + 1, dtype=torch.bool, device=topk.device)
        wanted[torch.where(earlier, at, before)] = True  # the spare last entry takes the rest
        wanted[before] = False
        slots = wanted.cumsum(0) + (own - 1)
        staged = torch.where(wanted, slots, -1)[:before]
        self._ops.uva_sparse_gather(host, self._rows, host_rows, staged)
        found = torch.where(earlier, slots[torch.where(earlier, at, before)], at - before)
        return torch.where(at < 0, -1, found).int()


def _parts(count: int, piece: int) -> Iterator[slice]:
    for low in range(0, count, piece):
        yield slice(low, min(low + piece, count))
