"""Every op whose contract allows it has a case without tokens, and one without requests where it knows requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baige_device.ops import OP_NAMES
from baige_device.testing.cases import Trial, all_cases
from baige_device.testing.lab import Lab

EMPTY: dict[str, tuple[tuple[str, str, int], ...]] = {
    "uva_sparse_gather": (
        ("rows-0", "src_rows", 0),
        ("zero-requests-int32", "src_rows", 0),
        ("no-requests", "dst_rows", 1),
    ),
    "uva_sparse_scatter": (("rows-0", "src_rows", 0), ("zero-requests-int64", "count", 0)),
    "hot_cache_resolve": (("no-rows", "keys", 0), ("no-keys", "keys", 1), ("no-states", "slot_keys", 0)),
    "quantize_blocks": (("fp8_e4m3-0x64", "weight", 0), ("int8_absmax-5x0", "weight", 1)),
    "dequantize_blocks": (("fp8_e4m3-0x64", "payload", 0), ("int8_absmax-5x0", "payload", 1)),
    "attend_paged": (("no-requests", "seq_lens", 0), ("no-requests-padded", "seq_lens", 0), ("no-tokens", "q", 0)),
    "sparse_attention": (
        ("gqa-tokens-0", "q", 0),
        ("mla-tokens-0", "q", 0),
        ("fp8-tokens-0", "q", 0),
        ("mla-topk-0", "indices", 2),
    ),
    "merge_attention": (("tokens-0", "out_a", 0),),
    "index_topk": (("no-requests", "seq_lens", 0), ("no-requests-padded", "seq_lens", 0), ("no-tokens", "q", 0)),
    "kv_write": (("tokens-0", "slots", 0), ("only-spare-slots", "values", 0)),
    "moe_expert_ffn": (("flat-no-tokens", "batch.x", 0), ("expert_major-no-tokens", "batch.x", 0)),
}
"""Op -> (case, argument, dimension of length 0)."""

NOT_TRIALS = {
    "host_alloc": {"bytes-0"},
    "fp8_all_gather": {"one-rank-0-bytes", "one-rank-0-bytes-allocated"},
    "moe_dispatch": {"flat-tokens-0", "expert_major-tokens-0", "masked-tokens-0", "expert_major-alignment-8-empty"},
    "moe_combine": {"flat-tokens-0", "expert_major-tokens-0", "masked-tokens-0"},
}
"""Op -> cases that draw no argument in one step, known to be empty by their names."""


def test_every_op_is_listed() -> None:
    assert EMPTY.keys() | NOT_TRIALS.keys() == set(OP_NAMES)


@pytest.mark.parametrize("op", EMPTY)
def test_the_case_is_empty(op: str) -> None:
    cases = {case.id: case for case in all_cases([op])}
    for name, argument, dim in EMPTY[op]:
        run = cases[name].run
        assert isinstance(run, Trial)
        first, *path = argument.split(".")
        value: Any = run.build(_lab())[first]
        for part in path:
            value = getattr(value, part)
        assert value.shape[dim] == 0, f"{op}/{name}: {argument} is {list(value.shape)}"


@pytest.mark.parametrize("op", NOT_TRIALS)
def test_the_case_exists(op: str) -> None:
    assert NOT_TRIALS[op] <= {case.id for case in all_cases([op])}


class _NoOps:
    """The pools come from torch."""

    def serves(self, op: str) -> bool:
        return False


def _lab() -> Lab:
    return Lab(_NoOps(), torch.device("cpu"), 7)  # type: ignore[arg-type]
