"""The abacus runtime: two in-order streams, events between them, and a DMA engine that moves whole words."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

WORD_BYTES = 4

Work = Callable[[], None]


class Stream:
    """Work runs in order, off the caller's thread. An event is a `Future` that another stream can wait for."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"abacus-{name}", daemon=True).start()

    def submit(self, work: Work, after: Future[None] | None = None) -> Future[None]:
        """Queue `work` behind what is queued, and behind the event `after` of another stream."""
        event: Future[None] = Future()
        self._queue.put((work if after is None else lambda: (after.result(), work())[1], event))
        return event

    def _serve(self) -> None:
        while True:
            work, event = self._queue.get()
            try:
                work()
                event.set_result(None)
            except BaseException as error:  # the caller's `result()` raises it
                event.set_exception(error)


_streams: dict[tuple[int, str], Stream] = {}


def stream(name: str) -> Stream:
    """This process's stream `compute` or `transfer`; a forked child gets streams of its own."""
    key = (os.getpid(), name)
    if key not in _streams:
        _streams[key] = Stream(name)
    return _streams[key]


def run(work: Work) -> None:
    """Run on the compute stream and wait: the chip's tensors are CPU tensors, which the host may read at once."""
    stream("compute").submit(work).result()


def dma(src: torch.Tensor, dst: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
    """Copy byte rows of `[P, N, W]` pools; W must be whole words. Part of the transfer stream's work."""
    if src.shape[2] % WORD_BYTES or dst.shape[2] % WORD_BYTES:
        raise ValueError(f"abacus dma: expected rows of whole {WORD_BYTES}-byte words, got {src.shape[2]} bytes")
    dst[dst_rows // dst.shape[1], dst_rows % dst.shape[1]] = src[src_rows // src.shape[1], src_rows % src.shape[1]]
