"""What the device tests share: the skip without a GPU, and graph capture with a warm-up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

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
