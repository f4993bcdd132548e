"""`HotLayers` over pages of an engine: mixed batches of prompt chunks and decodes against attention over all rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

import baige_device
from baige_device.errors import BaigeError, ContractError, SettingsError
from baige_device.optimizations.hisparse import HiSparseConfig
from baige_device.optimizations.hisparse.footprint import footprint
from baige_device.optimizations.hisparse.layer import HotLayers, as_rows
from baige_device.optimizations.hisparse.paged import PagedHotCache
from baige_device.optimizations.hisparse.staging import Staging
from baige_device.optimizations.hisparse.step import plan_step
from baige_device.settings import Settings

CPU = torch.device("cpu")
LATENT, ROPE, HEADS = 6, 2, 3
WIDTH = LATENT + ROPE
TOPK, PAGE, PAGES, REQUESTS, LIMIT = 4, 4, 40, 4, 2
CONFIG = HiSparseConfig(
    num_layers=3,
    row_bytes=WIDTH * 4,
    topk=TOPK,
    hot_tokens=8,
    max_requests=REQUESTS,
    max_context_tokens=64,
    host_tokens=PAGES * PAGE,
    page_tokens=PAGE,
    layer_groups=(0, 0, 1),
)


def make(staged: int = 64, *, overlap: bool = False) -> HotLayers:
    ops = baige_device.activate(Settings(backend="reference", checks="values")).ops
    cache = PagedHotCache(CONFIG, ops, CPU)
    return HotLayers(cache, Staging(ops, staged, CONFIG.row_bytes, CPU), ops, overlap=overlap)


@dataclass
class Request:
    """What must be true of one request: its pages, and every row of every layer."""

    name: str
    pages: list[int]
    rows: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(0, WIDTH) for _ in range(3)])

    @property
    def tokens(self) -> int:
        return self.rows[0].shape[0]


def step(layers: HotLayers, batch: list[tuple[Request, int]]) -> None:
    """Add tokens to each request and check every layer's attention against all of the request's rows."""
    counts = [count for _, count in batch]
    starts = torch.tensor([0, *counts]).cumsum(0)
    contexts = [request.tokens + count for request, count in batch]
    table = torch.full((len(batch) + 1, 16), 99999, dtype=torch.int32)  # what is behind a request's tokens is not read
    for index, (request, _) in enumerate(batch):
        table[index, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
    states = layers.cache.adopt([*(request.name for request, _ in batch), None])
    starts = torch.cat([starts, starts[-1:]]).int()  # a padded request without tokens
    lengths = torch.tensor([*contexts, 0], dtype=torch.int32)
    layers.begin(plan_step(states, starts, lengths, starts.tolist(), lengths.tolist(), LIMIT), states, table)
    total = sum(counts)
    topk = torch.full((total, TOPK), -1, dtype=torch.int32)
    for index, (request, count) in enumerate(batch):
        for offset in range(count):
            visible = request.tokens + offset + 1
            picked = torch.randperm(visible)[: min(TOPK, visible)].int()
            topk[int(starts[index]) + offset, : len(picked)] = picked
    for layer in range(3):
        latent, rope = torch.randn(total, LATENT), torch.randn(total, 1, ROPE)
        q = torch.randn(total, HEADS, WIDTH)
        rows = as_rows(latent, rope)
        layers.write(layer, rows)
        out = layers.attend(layer, q, rows, topk, scale=0.3, v_dim=LATENT)
        for index, (request, count) in enumerate(batch):
            new = torch.cat([latent, rope[:, 0]], dim=1)[int(starts[index]) : int(starts[index + 1])]
            request.rows[layer] = torch.cat([request.rows[layer], new])
            for token in range(int(starts[index]), int(starts[index]) + count):
                keys = request.rows[layer][topk[token][topk[token] >= 0].long()]
                weights = torch.softmax(0.3 * q[token] @ keys.T, dim=-1)
                torch.testing.assert_close(out[token], weights @ keys[:, :LATENT], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("staged", "overlap"), [(64, False), (13, True)])
def test_mixed_batches_attend_to_the_right_rows(staged: int, overlap: bool) -> None:
    """With 13 staged rows a chunk of 9 leaves room for one query's top-k, so that it is served query by query."""
    torch.manual_seed(5)
    draw = random.Random(5)
    layers = make(staged, overlap=overlap)
    free = list(range(PAGES))
    live: dict[str, Request] = {}
    for number in range(50):
        if len(live) < REQUESTS and draw.random() < 0.5:
            pages = [free.pop(draw.randrange(len(free))) for _ in range(PAGES // REQUESTS)]
            live[f"r{number}"] = Request(f"r{number}", pages)
        if live and draw.random() < 0.2:
            name = draw.choice([*live])
            if draw.random() < 0.5:  # finished or aborted
                free += live.pop(name).pages
            layers.cache.release(name)  # else preempted: it comes back without its hot rows
        batch = []
        for request in draw.sample([*live.values()], draw.randint(0, len(live))):
            room = len(request.pages) * PAGE - request.tokens
            count = min(room, draw.choice([1, 1, LIMIT, 5, 9]))
            if count:
                batch.append((request, count))
        if batch:
            step(layers, batch)
    stats = layers.cache.stats()
    assert stats.missed > 40
    assert stats.wanted - stats.missed > 40
    for name in live:
        layers.cache.release(name)
    assert layers.cache.free_requests == REQUESTS
    assert layers.cache.free_host_pages == PAGES  # the engine's, never ours
    layers.cache.close()


def test_two_requests_share_a_page_that_one_of_them_fills_in_the_same_step() -> None:
    torch.manual_seed(6)
    layers = make()
    first = Request("first", [3, 7])
    step(layers, [(first, 4)])
    shared = Request("second", [3, 9], [rows.clone() for rows in first.rows])
    step(layers, [(first, 1), (shared, 3)])
    step(layers, [(shared, 1), (first, 1)])


def test_more_requests_than_hot_rows_is_an_error_and_takes_nothing() -> None:
    cache = make().cache
    cache.adopt(["a", "b", "c", "d"])
    with pytest.raises(BaigeError, match="expected a free hot row, got none of 4"):
        cache.adopt(["a", "e"])
    assert cache.free_requests == 0
    cache.release("b")
    assert cache.adopt(["e", None]).tolist() == [1, -1]


def test_a_chunk_that_fills_the_workspace_is_refused() -> None:
    layers = make(staged=8)
    request = Request("r", [0, 1, 2, 3])
    step(layers, [(request, 8)])
    with pytest.raises(ContractError, match=r"own\.shape"):
        step(layers, [(request, 5)])


def test_an_empty_step_and_one_of_padding_alone() -> None:
    layers = make()
    states = layers.cache.adopt([None, None])
    starts = torch.tensor([0, 1, 1], dtype=torch.int32)
    lengths = torch.tensor([1, 0], dtype=torch.int32)
    layers.begin(plan_step(states, starts, lengths, [0, 1, 1], [1, 0], LIMIT), states, torch.zeros(2, 3).int())
    rows = as_rows(torch.ones(1, LATENT), torch.ones(1, 1, ROPE))
    layers.write(0, rows)
    out = layers.attend(0, torch.ones(1, HEADS, WIDTH), rows, torch.zeros(1, TOPK).int(), scale=1.0, v_dim=LATENT)
    assert out.shape == (1, HEADS, LATENT)
    assert not layers.cache.host.any()
    plan = plan_step(states, starts * 0, lengths * 0, [0, 0, 0], [0, 0], LIMIT)
    assert (plan.decode, plan.prompt, plan.chunks) == (None, None, ())


def test_footprint_is_what_the_pools_take() -> None:
    layers = make(staged=20)
    taken = footprint(CONFIG, 20)
    cache = layers.cache
    assert taken.hot_bytes == cache.hot.nbytes
    assert taken.state_bytes == sum(tensor.nbytes for tensor in (cache._slot_keys, cache._lru_slots, cache._pages))
    assert taken.staging_bytes == 20 * CONFIG.row_bytes
    assert f"= {taken.total_bytes / (1 << 20):.1f} MiB" in taken.explain()
    with pytest.raises(SettingsError, match="expected >= topk = 4, got 3"):
        footprint(CONFIG, 3)
