"""Arguments that no op can serve are named before anything is written, whatever the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baige_device.errors import ContractError
from baige_device.ops import contract
from baige_device.ops.hot_cache_resolve.contract import empty_plan


def attend(**changes: Any) -> dict[str, Any]:
    batch = {
        "q": torch.randn(3, 4, 8),
        "k_cache": torch.randn(4, 2, 2, 8),
        "v_cache": torch.randn(4, 2, 2, 8),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "q_starts": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([4, 3], dtype=torch.int32),
        "scale": 0.3,
    }
    return batch | changes


def topk(**changes: Any) -> dict[str, Any]:
    batch = {name: value for name, value in attend().items() if name not in ("v_cache", "scale")}
    return batch | {"weights": torch.rand(3, 4), "k_cache": torch.randn(4, 2, 8), "topk": 2} | changes


def sparse(**changes: Any) -> dict[str, Any]:
    lists = torch.tensor([[[0, 1, -1, -1]], [[2, -1, 3, 0]]], dtype=torch.int32)
    rows = {"q": torch.randn(2, 4, 8), "k_rows": torch.randn(5, 1, 8), "v_rows": torch.randn(5, 1, 8)}
    return rows | {"indices": lists, "scale": 0.3} | changes


def resolve(**changes: Any) -> dict[str, Any]:
    state = {
        "keys": torch.tensor([[3, 3, -1], [7, 8, 9]], dtype=torch.int32),
        "state_rows": torch.tensor([0, 1], dtype=torch.int32),
        "slot_keys": torch.tensor([[3, -1, -1, 5], [-1, -1, -1, -1]], dtype=torch.int32),
        "lru_slots": torch.arange(4, dtype=torch.int16).repeat(2, 1),
    }
    return state | changes


def refuse(op: str, arguments: dict[str, Any], message: str, *, values: bool) -> None:
    with pytest.raises(ContractError, match=message):
        contract(op).check(values, **arguments)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("attend_paged", attend()),
        ("index_topk", topk()),
        ("sparse_attention", sparse()),
        ("hot_cache_resolve", resolve()),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_right_passes(op: str, arguments: dict[str, Any]) -> None:
    contract(op).check(True, **arguments)


Q = torch.randn(3, 4, 8)
KEYS = resolve()["keys"]


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("attend_paged", attend(q=Q, out=Q), r"out: expected memory apart from q, got the memory of q"),
        ("attend_paged", attend(out=torch.empty(3, 1, 8).expand(3, 4, 8)), r"out.stride: expected memory of its own"),
        ("attend_paged", attend(window=1.5), r"window: expected an integer >= 0, got 1.5"),
        ("attend_paged", attend(max_seq_tokens=-1), r"max_seq_tokens: expected an integer >= 0, got -1"),
        (
            "attend_paged",
            attend(logits_soft_cap=float("inf")),
            r"logits_soft_cap: expected a finite number >= 0, got inf",
        ),
        ("attend_paged", attend(scale=float("nan")), r"scale: expected a finite number, got nan"),
        ("attend_paged", attend(q=torch.randn(3, 0, 8)), r"q.shape\[1\]: expected >= 1, got 0"),
        (
            "attend_paged",
            attend(k_cache=torch.randn(4, 0, 2, 8), v_cache=torch.randn(4, 0, 2, 8)),
            r"k_cache.shape\[1\]: expected >= 1, got 0",
        ),
        ("index_topk", topk(topk=2.5), r"topk: expected an integer >= 1, got 2.5"),
        ("index_topk", topk(topk=True), r"topk: expected an integer >= 1, got True"),
        ("index_topk", topk(q=torch.randn(3, 0, 8), weights=torch.rand(3, 0)), r"q.shape\[1\]: expected >= 1, got 0"),
        ("hot_cache_resolve", resolve(keys=KEYS, out=empty_plan(KEYS)._replace(miss_keys=KEYS)), r"apart from keys"),
    ],
)
def test_shapes_and_numbers(op: str, arguments: dict[str, Any], message: str) -> None:
    refuse(op, arguments, message, values=False)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("attend_paged", attend(max_query_tokens=1), r"max_query_tokens: expected 0 or >= 2, the longest, got 1"),
        ("attend_paged", attend(max_seq_tokens=3), r"max_seq_tokens: expected 0 or >= 4, the longest, got 3"),
        ("index_topk", topk(max_seq_tokens=3), r"max_seq_tokens: expected 0 or >= 4"),
        (
            "sparse_attention",
            sparse(indices=torch.tensor([[[0, 1, 2, 3]], [[2, -1, 0, 2]]], dtype=torch.int32)),
            r"indices\[1, 0\]: expected distinct rows, got 2 twice",
        ),
        (
            "hot_cache_resolve",
            resolve(keys=torch.tensor([[3, -2, -1], [7, 8, 9]], dtype=torch.int32)),
            r"keys\[0, 1\]: expected -1 or an index .*, got -2",
        ),
        (
            "hot_cache_resolve",
            resolve(slot_keys=torch.tensor([[5, 3, -1, 5], [-1, -1, -1, -1]], dtype=torch.int32)),
            r"slot_keys\[0\]\[3\]: expected each row named once, got 5 as in slot_keys\[0\]\[0\]",
        ),
    ],
)
def test_values(op: str, arguments: dict[str, Any], message: str) -> None:
    contract(op).check(False, **arguments)
    refuse(op, arguments, message, values=True)
