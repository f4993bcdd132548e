"""`moe_dispatch` over `deep_ep`, the vendor's port of DeepEP, for int8 rows with one factor a row.

That payload is the one with which the port's normal mode is called in public code. What public code does not show
(the order of received rows, factors carried bit by bit, what combine does with tokens without an expert) is proven on
each group at its first dispatch against `moe_exchange`: the ranks exchange verdicts, so all of them take `deep_ep` or
none does, and the reason is logged. An error of the library ends the start; it is not caught.
"""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baige_device.backends.kunlun import moe, moe_exchange, normalise, vendor
from baige_device.backends.kunlun.limits import DEEP_EP_ALIGNMENT
from baige_device.backends.kunlun.moe_exchange import AllToAll, Arrived, Route
from baige_device.errors import ContractError
from baige_device.ops.base import group_rank_and_size
from baige_device.ops.moe_dispatch.contract import ExpertBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DeepEp", "moe_dispatch", "refusal", "without_unserved"]

logger = logging.getLogger("baige_device")


@dataclass(frozen=True)
class _Link:
    """The buffer of one group, width and expert count, and why the group does not use it (empty when it does)."""

    buffer: Any
    refused: str


_links: dict[tuple[Any, int, int], _Link] = {}
atexit.register(_links.clear)  # a buffer holds its group, whose threads must end before the interpreter does


@dataclass(frozen=True)
class DeepEp:
    """Rows that the vendor's buffer brought; `plain` is how the same rows would have travelled otherwise."""

    buffer: Any
    handle: Any
    plain: AllToAll
    served: Tensor
    """bool `[T]`: the token has an expert on some rank."""

    def bring_home(self, rows: Tensor) -> Tensor:
        """bf16 by the buffer; fp16 and fp32, with which nobody calls it, as the same rows by `all_to_all_single`."""
        if rows.dtype is not torch.bfloat16:
            return self.plain.bring_home(rows)
        home, _, _ = self.buffer.combine(
            normalise.dense(rows),
            self.handle,
            async_finish=False,
            previous_event=None,
            allocate_on_comm_stream=False,
            config=None,
        )
        return without_unserved(home, self.served)


def without_unserved(home: Tensor, served: Tensor) -> Tensor:
    """Rows of tokens that no rank answered are left as they were by the buffer: zero them."""
    return torch.where(served.unsqueeze(1), home, 0.0)


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
    """See the contract; x int8 with x_scales `[T, 1]`. The first call of a group sets its buffer up: a collective.

    Raises:
        ContractError: another payload.
    """
    if x.dtype is not torch.int8 or x_scales is None or x_scales.shape[1] != 1:
        got = f"{x.dtype}, x_scales {None if x_scales is None else list(x_scales.shape)}"
        raise ContractError("moe_dispatch", "x", "int8 with x_scales [T, 1] (deep_ep)", got)
    send: moe.Send = moe_exchange.send
    if group_rank_and_size(group)[1] > 1:
        link = _link(group, x.shape[1], num_experts, x.device)
        if not link.refused:
            send = _Sender(link.buffer).send
    return moe.dispatch_over(
        send,
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


def refusal(group: ProcessGroup | None, hidden: int, num_experts: int) -> str | None:
    """Why a group does not use deep_ep; empty when it does, None before its first dispatch."""
    link = _links.get((_real(group), hidden, num_experts))
    return None if link is None else link.refused


@dataclass(frozen=True)
class _Sender:
    buffer: Any

    def send(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        scales: Tensor,
        local: int,
        capacity: int,
        group: ProcessGroup | None,
    ) -> tuple[Route, Arrived]:
        plain = AllToAll.plan(ids, local, capacity, group)
        (rows, factors), ids_in, weights_in, _, handle, _ = self.buffer.dispatch(
            (normalise.dense(x), normalise.dense(scales)),
            topk_idx=normalise.int32(ids),
            topk_weights=normalise.dense(weights),
            num_tokens_per_rank=None,
            num_tokens_per_rdma_rank=None,
            is_token_in_rank=None,
            num_tokens_per_expert=None,
            previous_event=None,
            async_finish=False,
            allocate_on_comm_stream=False,
            expert_alignment=DEEP_EP_ALIGNMENT.value,
            config=None,
        )
        first = group_rank_and_size(group)[0] * local
        arrived = Arrived(rows, torch.where(ids_in >= 0, ids_in + first, -1), weights_in, factors)
        return DeepEp(self.buffer, handle, plain, (ids >= 0).any(1)), arrived


def _link(group: ProcessGroup | None, hidden: int, num_experts: int, device: torch.device) -> _Link:
    key = (_real(group), hidden, num_experts)
    if key not in _links:
        refused = _no_all_to_all(group, device)
        buffer = None if refused else _make_buffer(key[0], hidden, num_experts)
        refused = refused or _prove(buffer, group, hidden, num_experts, device)
        _links[key] = _Link(buffer, refused)
        level = logging.WARNING if refused else logging.INFO
        logger.log(level, "moe_dispatch: transport %s", refused or "deep_ep: proven on this group")
    return _links[key]


def _real(group: ProcessGroup | None) -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if group is None else group


def _no_all_to_all(group: ProcessGroup | None, device: torch.device) -> str:
    backend = moe_exchange.group_backend(group, device)
    if backend in moe_exchange.ALL_TO_ALL_BACKENDS:
        return ""
    return f"{moe_exchange.reason(backend)}; deep_ep is used beside all_to_all_single only, which carries fp16 and fp32"


def _make_buffer(group: Any, hidden: int, num_experts: int) -> Any:
    """A buffer for rows of up to 16 bits, sized by the library's own hints as its callers do."""
    library = vendor.deep_ep_buffer()
    size = group.size()
    configs = (library.get_dispatch_config(size), library.get_combine_config(size))
    return library(
        group,
        max(config.get_nvl_buffer_size_hint(2 * hidden, size) for config in configs),
        max(config.get_rdma_buffer_size_hint(2 * hidden, size) for config in configs),
        low_latency_mode=False,
        num_qps_per_rank=library.num_sms,
        allow_mnnvl=True,
        num_experts=num_experts,
    )


def _prove(buffer: Any, group: ProcessGroup | None, hidden: int, num_experts: int, device: torch.device) -> str:
    """Send known rows both ways; empty when they agree on every rank, else why deep_ep is not used. A collective."""
    import torch.distributed as dist

    rank, size = group_rank_and_size(group)
    tokens, local = 5 + 2 * rank, num_experts // size
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-127, 128, (tokens, hidden), generator=generator).to(device, torch.int8)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(tokens)])
    ids[2] = -1
    ids = ids.to(device, torch.int32)
    weights = torch.rand(ids.shape, generator=generator).to(device)
    scales = torch.rand(tokens, 1, generator=generator).to(device)
    args = (x, ids, weights, scales, local, 5 + 2 * size, group)
    theirs, got = _Sender(buffer).send(*args)
    ours, want = moe_exchange.send(*args)
    wrong = _difference(got, want, rank * local, local)
    if not wrong:
        # Sums of two int8 are exact in bf16, so both ways home must agree bit by bit.
        rows = want.x.to(torch.bfloat16)
        back, plain = theirs.bring_home(rows), ours.bring_home(rows)
        wrong = "" if torch.equal(back, plain) else "other sums"
    else:  # the other ranks are in these collectives
        theirs.bring_home(got.x.to(torch.bfloat16))
        ours.bring_home(want.x.to(torch.bfloat16))
    verdict = torch.tensor([0 if wrong else 1], dtype=torch.int32, device=device)
    verdicts = [torch.zeros_like(verdict) for _ in range(size)]
    dist.all_gather(verdicts, verdict, group=group)
    bad = [index for index, item in enumerate(verdicts) if not int(normalise.host_copy(item))]
    if not bad:
        return ""
    here = f" ({wrong} here)" if wrong else ""
    return f"all_to_all_single: deep_ep moves rows differently on ranks {bad}{here}"


def _difference(got: Arrived, want: Arrived, first: int, local: int) -> str:
    assert got.scales is not None
    assert want.scales is not None
    if not torch.equal(got.x, want.x) or not torch.equal(got.scales, want.scales):
        return "other rows, or another order than (source rank, token)"
    here = (want.ids >= first) & (want.ids < first + local)
    if not torch.equal(got.ids, torch.where(here, want.ids, -1)):
        return "other expert ids"
    return "" if torch.equal(got.weights[here], want.weights[here]) else "other weights"
