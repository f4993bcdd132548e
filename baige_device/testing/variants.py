"""The same call as a replayed device graph and on a second stream; for devices of torch type `cuda`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baige_device.testing.cases import Call, Trial
from baige_device.testing.checks import named_tensors, storage_bytes, twins
from baige_device.testing.lab import Lab, poison_

__all__ = ["GraphTrial", "StreamTrial"]

_REPLAYS = 3
_DELAY_PRODUCTS = 40
"""Products of 2048 x 2048 matrices, some 10 ms: work on a wrong stream starts before its inputs have arrived."""


@dataclass(frozen=True)
class GraphTrial:
    """Capture the call once, then replay it with other values in the same buffers, outputs poisoned each time."""

    trial: Trial

    def __call__(self, lab: Lab) -> float:
        static = self.trial.build(lab)
        op = getattr(lab.ops, self.trial.op)
        graph, result = _capture(op, static)
        worst = 0.0
        for replay in range(_REPLAYS):
            _load(static, self.trial.build(lab.fork(replay + 1)))
            _poison_result(static, result)
            before = twins(static)
            graph.replay()
            lab.synchronize()
            worst = max(worst, self.trial.judge(Call(static, before, result)))
        return worst


@dataclass(frozen=True)
class StreamTrial:
    """Deliver the inputs late, on a side stream, and call the op there: it must run on the current stream."""

    trial: Trial

    def __call__(self, lab: Lab) -> float:
        static, fresh = self.trial.build(lab), self.trial.build(lab.fork(1))
        before = twins(fresh)
        op = getattr(lab.ops, self.trial.op)
        op(**self.trial.build(lab.fork(2)))
        busy = torch.zeros(2048, 2048, device=lab.device)
        busy_out = torch.empty_like(busy)
        lab.synchronize()
        side = torch.cuda.Stream(lab.device)
        with torch.cuda.stream(side):
            for _ in range(_DELAY_PRODUCTS):
                torch.mm(busy, busy, out=busy_out)
            _load(static, fresh)
            result = op(**static)
        lab.synchronize()
        return self.trial.judge(Call(static, before, result))


def _capture(op: Any, static: Mapping[str, Any]) -> tuple[Any, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(**static)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(**static)
    return graph, result


def _load(static: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    for (_, target), (_, source) in zip(named_tensors(static), named_tensors(fresh), strict=True):
        storage_bytes(target).copy_(storage_bytes(source))


def _poison_result(static: Mapping[str, Any], result: Any) -> None:
    given = {tensor.untyped_storage().data_ptr() for _, tensor in named_tensors(static)}
    for _, tensor in named_tensors({"result": result if isinstance(result, tuple) else (result,)}):
        if tensor.untyped_storage().data_ptr() not in given:
            poison_(tensor)
