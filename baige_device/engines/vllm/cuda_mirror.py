"""HiSparse's host copy of decoded rows on NVIDIA: one scatter a layer, whose rows are read on the device.

The host reads each step's slot mapping back, waits for it, selects and coalesces the written rows in NumPy, and hands
descriptors to the driver. A pure decode step writes one row a request, and both slot mappings are on the device, so
`uva_sparse_scatter` needs neither. Steps with prompt tokens stay the host's: their rows come in long runs.
"""

from __future__ import annotations

import functools
from typing import Any

from baige_device.engines.vllm.cuda_replay import Repeated, may_repeat
from baige_device.engines.vllm.ledger import LEDGER
from baige_device.registry.table import OpTable

__all__ = ["FINISH", "PREPARE", "STAGE", "mount_mirror"]

_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker:HiSparseConnectorWorker"
STAGE = f"{_WORKER}._stage_row_mirror_mapping"
PREPARE = f"{_WORKER}.prepare_forward"
FINISH = f"{_WORKER}._finish_mirror_phase"


def mount_mirror(features: Any) -> None:
    """Replace the mirror of decode steps."""
    LEDGER.patch(STAGE, _stage_later)
    LEDGER.patch(PREPARE, _prepare)
    LEDGER.patch(FINISH, functools.partial(_finish, features.ops))


def _stage_later(original: Any) -> Any:
    """Only note the step's tokens; whether they are needed on the host is known once its kind is."""

    def stage(self: Any, num_tokens: int) -> None:
        self._baige_stage = functools.partial(original, self, num_tokens)

    return stage


def _prepare(original: Any) -> Any:
    def prepare_forward(self: Any, attn_metadata: Any) -> None:
        original(self, attn_metadata)
        if not _scatters(self):
            _stage_now(self)

    return prepare_forward


def _stage_now(worker: Any) -> None:
    """Read the slot mapping back as the host does, unless that was done for this step."""
    stage, worker._baige_stage = worker._baige_stage, None
    if stage is not None:
        stage()


def _forget_staged(worker: Any) -> None:
    """Drop what was read back for a step that turned out to be a decode step.

    Without CUDA graphs the step's metadata reaches the layers only, after `prepare_forward`.
    """
    if worker._slot_mapping_staging is not None:
        worker._slot_mapping_staging.num_tokens = 0


def _finish(ops: OpTable, original: Any) -> Any:
    repeats = may_repeat(ops, "uva_sparse_scatter")

    def finish_mirror_phase(self: Any, ready_event: Any = None) -> None:
        if not _scatters(self):
            _stage_now(self)
            original(self, ready_event)
            return
        _forget_staged(self)
        first = self.cache_handles[0]
        targets = first.mirror_slot_mapping
        rows = min(first.num_actual_tokens, targets.numel())
        named = targets[:rows]
        copies = [
            (handle.view.cache, handle.runtime.host_cache, handle.slot_mapping[:rows], named)
            for handle in self.cache_handles
        ]

        def run() -> None:
            for copy in copies:
                ops.uva_sparse_scatter(*copy)

        if repeats:
            key = (rows, *[tensor.data_ptr() for copy in copies for tensor in copy])
            _repeated(self, rows)(key, targets.device.index, run)
        else:
            run()
        # A row's slot was forgotten when its page was allocated, and each is written once, so no hot copy is stale.
        self._clear_forward_mirror_state()

    return finish_mirror_phase


def _repeated(worker: Any, rows: int) -> Repeated:
    by_rows: dict[int, Repeated] | None = getattr(worker, "_baige_repeated", None)
    if by_rows is None:
        by_rows = worker._baige_repeated = {}
    if rows not in by_rows:
        by_rows[rows] = Repeated(len(worker.cache_handles))
    return by_rows[rows]


def _scatters(worker: Any) -> bool:
    """Whether this step's rows are written by us: pure decode with one token a request, one process a host pool."""
    first = worker.cache_handles[0]
    return bool(
        first.decode_batch
        and first.host_mirror_required
        and first.num_actual_tokens > 0
        and worker.is_host_writer
        and worker.shared_host_region is None
        and not worker._draft_layers
        and not worker._per_layer_mirrored
    )
