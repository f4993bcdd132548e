"""`moe_dispatch` through DeepEP's NVLink kernels (its `Buffer`, versions 1.x); the layouts and the way back are ours.

DeepEP sends one row a (token, rank) and sums the partial results at home, like our own transports, so it stands in for
them: what arrives is laid out by the portable kernels, and `moe_combine` calls `bring_home`. Calls its `Buffer`,
`get_dispatch_layout`, `dispatch` and `combine`; source: https://github.com/deepseek-ai/DeepEP (deep_ep/buffer.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baige_device.backends.portable.moe_dispatch import lay_out_batch
from baige_device.backends.portable.moe_dispatch import moe_dispatch as portable_dispatch
from baige_device.backends.portable.moe_transport import Arrived, capturing
from baige_device.backends.portable.runtime import launching_on
from baige_device.errors import BackendError, ContractError
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.contract import ExpertBatch
from baige_device.ops.moe_dispatch.exchange import agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MOST_ROW_BYTES", "RANKS", "moe_dispatch"]

_OP = "moe_dispatch"
RANKS = (2, 4, 8)
"""Group sizes of its kernels within one host."""
MOST_ROW_BYTES = 16352
"""Its kernels move half a row at once through 8 KiB of shared memory a warp."""

_buffers: dict[ProcessGroup, tuple[Any, int]] = {}


@dataclass(frozen=True)
class _DeepEp:
    """How the rows of one dispatch came here: DeepEP's handle."""

    buffer: Any
    handle: Any

    def bring_home(self, rows: Tensor, out: Tensor) -> Tensor:
        if rows.dtype != torch.bfloat16:
            raise ContractError("moe_combine", "y.dtype", "bfloat16 (DeepEP)", str(rows.dtype).removeprefix("torch."))
        summed = self.buffer.combine(rows, self.handle)[0]
        return out.copy_(summed)


def moe_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    layout: str,
    max_tokens_per_rank: int,
    group: ProcessGroup | None = None,
    alignment: int = 1,
    x_scales: Tensor | None = None,
) -> ExpertBatch:
    """See the contract. bf16 rows, or fp8 rows with one scale for 128 columns. One rank is the portable kernels' case.

    Raises:
        ContractError: rows that DeepEP does not move. BackendError: a group of several hosts or of another size, or
            the first call of a group while a graph is captured.
    """
    size = group_rank_and_size(group)[1]
    if size == 1:
        return portable_dispatch(
            x,
            topk_ids,
            topk_weights,
            num_experts=num_experts,
            layout=layout,
            max_tokens_per_rank=max_tokens_per_rank,
            group=group,
            alignment=alignment,
            x_scales=x_scales,
        )
    _check_rows(x, x_scales)
    with launching_on(x):
        most = max_tokens_per_rank * size
        buffer = _buffer_for(group, 2 * x.shape[1])
        if not capturing(x):
            agree(_OP, x.shape[0], max_tokens_per_rank, [x.shape[0]] * size, group, x.device)
        arrived = _send(buffer, x, x_scales, topk_ids, topk_weights, num_experts, most)
        return lay_out_batch(arrived, x.shape[0], layout, 0, num_experts // size, alignment, most)


def _send(
    buffer: Any, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, num_experts: int, most: int
) -> Arrived:
    """`most` bounds the rows that can arrive: while a graph is captured they are not counted on the host."""
    import deep_ep

    ids = ids.to(deep_ep.topk_idx_t).contiguous()
    by_rank, _, by_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
    payload = x.contiguous() if scales is None else (x.contiguous(), scales.contiguous())
    received, ids_in, weights_in, _, handle, _ = buffer.dispatch(
        payload,
        num_tokens_per_rank=by_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=by_expert,
        topk_idx=ids,
        topk_weights=weights.contiguous(),
        num_worst_tokens=most if capturing(x) else 0,
    )
    x_in, scales_in = (received, None) if scales is None else received
    # Its ids are local already.
    return Arrived(x_in, ids_in, weights_in, scales_in, _DeepEp(buffer, handle), exact=not capturing(x))


def _check_rows(x: Tensor, scales: Tensor | None) -> None:
    row_bytes = x.shape[1] * x.element_size()
    wanted = "bf16 rows, or fp8 rows with fp32 scales of 128 columns"
    if x.dtype == torch.bfloat16:
        fits = scales is None
    else:
        fits = x.dtype == torch.float8_e4m3fn and scales is not None and 128 * scales.shape[1] == x.shape[1]
    if not fits or row_bytes % 32 or 2 * x.shape[1] > MOST_ROW_BYTES:
        got = f"{str(x.dtype).removeprefix('torch.')} rows of {row_bytes} bytes"
        got += "" if scales is None else f" with {scales.shape[1]} scales"
        raise ContractError(_OP, "x", f"{wanted}, of a multiple of 32 bytes (DeepEP)", got)


def _buffer_for(group: ProcessGroup | None, row_bytes: int) -> Any:
    """The group's communication buffer; made, by all ranks together, at the first call and for wider rows."""
    import torch.distributed as dist

    real: ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
    found = _buffers.get(real)
    if found is not None and found[1] >= row_bytes:
        return found[0]
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(f"{_OP}: group: expected one dispatch of rows this wide before graph capture, got none")
    from deep_ep import Buffer

    size = real.size()
    if size not in RANKS:
        raise BackendError(f"{_OP}: group: expected {RANKS} ranks (DeepEP within a host), got {size}")
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=real)
    if len(set(hosts)) > 1:
        raise BackendError(f"{_OP}: group: expected one host (DeepEP without RDMA), got {sorted(set(hosts))}")
    configs = (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size))
    num_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
    # It is never destroyed: its destructor meets the other ranks, and hangs where one has failed.
    _buffers[real] = (Buffer(real, num_bytes, explicitly_destroy=True), row_bytes)
    return _buffers[real][0]
