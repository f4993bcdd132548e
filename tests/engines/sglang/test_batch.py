"""The translation of SGLang's batches, against a lookup token by token; needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.engines.sglang.batch import make_batch
from baige_device.engines.sglang.compat import split_cores, window_tokens
from baige_device.errors import MountError

TABLE_TOKENS = 24


def host_batch(seq_lens: list[int], q_lens: list[int] | None, padding: int = 0) -> Any:
    """A `ForwardBatch` with the fields that are read; requests live in rows 3, 1, 5, ... of the table."""
    tokens = sum(q_lens) if q_lens is not None else len(seq_lens)
    mode = SimpleNamespace(is_decode=lambda: q_lens is None, is_target_verify=lambda: False)
    return SimpleNamespace(
        forward_mode=mode,
        spec_info=None,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int64),
        extend_seq_lens=torch.tensor(q_lens, dtype=torch.int32) if q_lens is not None else None,
        extend_seq_lens_cpu=q_lens,
        req_pool_indices=torch.tensor([3, 1, 5][: len(seq_lens)], dtype=torch.int64),
        out_cache_loc=torch.tensor([*range(100, 100 + tokens), *[0] * padding], dtype=torch.int64),
    )


def token_table(page_tokens: int) -> torch.Tensor:
    """Scattered pages, whole in themselves, as SGLang's paged allocator hands them out."""
    pages = torch.randperm(200, generator=torch.Generator().manual_seed(3))[: 6 * TABLE_TOKENS // page_tokens]
    rows = pages[:, None] * page_tokens + torch.arange(page_tokens)
    return rows.reshape(6, TABLE_TOKENS).int()


@pytest.mark.parametrize("page_tokens", [1, 4])
@pytest.mark.parametrize(
    ("seq_lens", "q_lens"), [([9, 1, 24], [4, 1, 24]), ([7, 0, 5], None), ([5], [5]), ([12, 3], [1, 0])]
)
def test_rows_are_those_of_the_token_table(page_tokens: int, seq_lens: list[int], q_lens: list[int] | None) -> None:
    table = token_table(page_tokens)
    host = host_batch(seq_lens, q_lens, padding=2)
    batch = make_batch(host, table, page_tokens)
    owners = [b for b, count in enumerate(q_lens or [1] * len(seq_lens)) for _ in range(count)]
    positions = torch.full((len(owners) + 2, 5), -1)  # two rows of padding
    for token, owner in enumerate(owners):
        if seq_lens[owner]:
            positions[token, :4] = torch.randint(seq_lens[owner], (4,))
    rows = batch.rows(positions)
    for token, owner in enumerate(owners):
        row = table[host.req_pool_indices[owner]]
        wanted = [-1 if p < 0 else int(row[p]) for p in positions[token].tolist()]
        assert rows[token].tolist() == wanted
    assert (rows[len(owners) :] == -1).all()
    assert batch.q_starts.tolist() == [0, *torch.tensor(q_lens or [1] * len(seq_lens)).cumsum(0).tolist()]
    assert batch.max_seq_tokens == max(seq_lens)
    assert batch.max_query_tokens == max(q_lens or [1])


def test_padding_writes_nothing() -> None:
    batch = make_batch(host_batch([2, 3], [1, 2], padding=3), token_table(1), 1)
    assert batch.slots.tolist() == [100, 101, 102, -1, -1, -1]


def test_no_requests() -> None:
    batch = make_batch(host_batch([], None), token_table(4), 4)
    assert batch.block_table.shape == (0, 0)
    assert batch.q_starts.tolist() == [0]
    assert batch.max_query_tokens == batch.max_seq_tokens == 0


def test_speculative_batches_are_refused() -> None:
    host = host_batch([4], None)
    host.spec_info = object()
    with pytest.raises(MountError, match="speculative decoding: expected none"):
        make_batch(host, token_table(1), 1)


@pytest.mark.parametrize(("size", "tokens"), [(None, 0), (-1, 0), (0, 1), (127, 128)])
def test_window_counts_the_query_itself(size: int | None, tokens: int) -> None:
    assert window_tokens(SimpleNamespace(sliding_window_size=size)) == tokens


@pytest.mark.parametrize(
    ("cores", "ranks", "text"), [([0, 1], 2, "0|1"), ([4, 5, 6, 7, 9], 2, "4,5|6,7"), ([3], 2, "3|3")]
)
def test_cores_are_split_between_ranks(cores: list[int], ranks: int, text: str) -> None:
    assert split_cores(cores, ranks) == text
