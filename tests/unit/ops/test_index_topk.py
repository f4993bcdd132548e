"""index_topk: the set of the best visible positions by float64 scores, -1 behind."""

from __future__ import annotations

import pytest
import torch

from baige_device.registry.table import OpTable

PAGE = 4


def make(lengths, queries, *, heads=24, dim=6):  # with few heads, ReLU makes exact ties at zero
    blocks = [-(-length // PAGE) for length in lengths]
    pages = torch.randperm(sum(blocks) + 2)
    pool = torch.full((len(pages), PAGE, dim), float("nan"))
    table = torch.zeros(len(lengths), max([*blocks, 1]), dtype=torch.int32)
    for b, length in enumerate(lengths):
        table[b, : blocks[b]] = pages[sum(blocks[:b]) : sum(blocks[: b + 1])]
        for s in range(length):
            pool[int(table[b, s // PAGE]), s % PAGE] = torch.randn(dim)
    starts = torch.tensor([sum(queries[:b]) for b in range(len(queries) + 1)])
    q, weights = torch.randn(sum(queries) + 1, heads, dim), torch.randn(sum(queries) + 1, heads)
    return q, weights, pool, table, starts, torch.tensor(lengths)


def expected(q, weights, pool, table, starts, lens, topk, scales=None) -> list[set[int]]:
    best: list[set[int]] = [set() for _ in range(q.shape[0])]
    for b, length in enumerate(lens.tolist()):
        first, last = int(starts[b]), int(starts[b + 1])
        for t in range(first, last):
            scores = {}
            for s in range(length - (last - t) + 1):
                at = int(table[b, s // PAGE]), s % PAGE
                key = pool[at].double() * (1.0 if scales is None else float(scales[at]))
                scores[s] = float((weights[t].double() * (q[t].double() @ key).relu()).sum())
            best[t] = set(sorted(scores, key=scores.__getitem__, reverse=True)[:topk])
    return best


@pytest.mark.parametrize("topk", [1, 3, 8, 40])
@pytest.mark.parametrize("scaled", [False, True])
def test_best_positions(ops: OpTable, topk: int, scaled: bool) -> None:
    batch = make([13, 0, 1, 9], [13, 0, 1, 2])
    scales = torch.rand(batch[2].shape[:2]) + 0.1 if scaled else None
    out = torch.full((batch[0].shape[0], topk), 123456, dtype=torch.int32)
    ops.index_topk(*batch, topk=topk, k_scales=scales, out=out)
    for row, best in zip(out.tolist(), expected(*batch, topk, scales), strict=True):
        listed = [position for position in row if position != -1]
        assert len(listed) == len(set(listed))
        assert set(listed) == best


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_eight_bit_keys(ops: OpTable, dtype: torch.dtype) -> None:
    q, weights, pool, *rest = make([11], [4])
    q, pool, scales = (10 * q).to(dtype), (10 * pool.nan_to_num()).to(dtype), torch.rand(pool.shape[:2]) + 0.5
    out = ops.index_topk(q, weights, pool, *rest, topk=5, k_scales=scales)
    wanted = expected(q.float(), weights, pool.float(), *rest, 5, scales)
    assert [set(row) - {-1} for row in out.tolist()] == wanted


def test_tiles_of_queries_give_the_same(ops: OpTable, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make([30], [30])
    whole = ops.index_topk(*batch, topk=4).sort(1).values
    monkeypatch.setattr("baige_device.ops.index_topk.reference._TILE_LOGITS", 24 * 30 * 7)
    assert torch.equal(ops.index_topk(*batch, topk=4).sort(1).values, whole)
