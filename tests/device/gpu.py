"""What the device tests share: the skip without a GPU, graph capture with a warm-up, and how close attention is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call of `work`, after one warm-up call on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def assert_attention_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """(out, lse) of 16-bit kernels; a query without rows has -inf in both."""
    torch.testing.assert_close(got[0].float(), want[0].float(), atol=1.6e-2, rtol=1.6e-2)
    empty = want[1] == -math.inf
    assert torch.equal(got[1] == -math.inf, empty)
    torch.testing.assert_close(got[1][~empty], want[1][~empty], atol=1e-2, rtol=1e-2)
