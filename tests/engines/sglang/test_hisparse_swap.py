"""Each swap-in function of SGLang against dictionaries, over random streams of requests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baige_device.activation import activate, deactivate
from baige_device.engines.sglang import hisparse_spec, hisparse_swap
from baige_device.engines.sglang.hisparse_counts import COUNTS
from baige_device.errors import MountError
from baige_device.optimizations.hisparse.lane import Lane
from baige_device.settings import Settings
from tests.engines.sglang.swap_model import World

HOT, TOPK, REQUESTS, CONTEXT = 16, 12, 6, 90
STEPS = 40


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    torch.manual_seed(0)
    deactivate()
    activate(Settings(backend="reference", checks="values"))
    yield
    deactivate()


def world(seed: int, **sizes: Any) -> World:
    return World(REQUESTS, HOT, CONTEXT, generator=torch.Generator().manual_seed(seed), **sizes)


def batches(subject: World, padded: int = 2) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
    """(requests, req_pool_indices, seq_lens, num_real_reqs) of a decode stream; lengths cross the hot size.

    Padded rows name request 0 and garbage lengths.
    """
    lengths = [1, HOT - 3, HOT, HOT + 1, 60, 80]
    for _ in range(STEPS):
        chosen = torch.randperm(REQUESTS, generator=subject.generator)[: 1 + _ % REQUESTS].tolist()
        for request in chosen:
            lengths[request] = min(lengths[request] + 1, CONTEXT)
            subject.grow(request, lengths[request])
        rows = torch.tensor(chosen + [0] * padded)
        seq_lens = torch.tensor([lengths[request] for request in chosen] + [CONTEXT] * padded)
        yield chosen, rows, seq_lens, torch.tensor([len(chosen)], dtype=torch.int32)


def test_tokens_with_recorded_plan_and_replay() -> None:
    subject, follower = world(1), world(1)
    follower.host = torch.randn_like(follower.host)
    for request in range(REQUESTS):
        for token in range(HOT):
            follower.device[subject.locs[request, token].long()] = follower.host[subject.host_locs[request, token]]
    copied = 0
    for chosen, rows, seq_lens, real in batches(subject):
        wanted = [subject.wanted(int(length), TOPK) for length in seq_lens[: len(chosen)]]
        expected = [subject.expect(r, int(n), w) for r, n, w in zip(chosen, seq_lens, wanted, strict=False)]
        top_k = torch.full((rows.shape[0], TOPK), 3, dtype=torch.int32)
        top_k[: len(chosen)] = torch.tensor(wanted, dtype=torch.int32)
        out = torch.full((rows.shape[0], TOPK + 2), 123456, dtype=torch.int32)
        src = torch.full((rows.shape[0], 2 * TOPK), 999, dtype=torch.int64)
        dst, count = src.int(), torch.full((rows.shape[0],), 77, dtype=torch.int32)
        hisparse_swap.load_cache_to_device_buffer_mla(
            top_k,
            host_cache=subject.host,
            device_buffer=subject.device,
            top_k_device_locs=out,
            req_pool_indices=rows,
            seq_lens=seq_lens.int(),
            item_size_bytes=20,
            num_top_k=TOPK,
            hot_buffer_size=HOT,
            num_real_reqs=real,
            miss_src=src,
            miss_dst=dst,
            miss_count=count,
            **subject.tables(),
        )
        assert bool((out[:, TOPK:] == 123456).all())
        assert bool((out[len(chosen) :, :TOPK] == -1).all())
        for row, (request, (locs, copies)) in enumerate(zip(chosen, expected, strict=True)):
            assert out[row, :TOPK].tolist() == locs
            n = int(count[row])
            assert list(zip(src[row, :n].tolist(), dst[row, :n].tolist(), strict=True)) == copies
            subject.check_rows(request, wanted[row], locs)
            copied += n
        subject.check_state()
        for row, request in enumerate(chosen):
            follower.grow(request, int(seq_lens[row]))
        hisparse_swap.copy_cache_planned_mla(
            miss_src=src,
            miss_dst=dst,
            miss_count=count,
            num_real_reqs=real,
            host_cache=follower.host,
            device_buffer=follower.device,
            item_size_bytes=20,
        )
        for row, request in enumerate(chosen):
            follower.check_rows(request, wanted[row], out[row, :TOPK].tolist())
    assert copied > 100


@pytest.mark.parametrize("skip_io", [False, True])
def test_blocks_of_keys_and_values(skip_io: bool) -> None:
    subject, block = world(2, row=(1, 6)), 4
    values, device_values = torch.randn_like(subject.host), torch.full_like(subject.device, torch.nan)
    for chosen, rows, seq_lens, real in batches(subject):
        top_k = torch.full((rows.shape[0], TOPK // block), -1, dtype=torch.int32)
        expected = []
        for row, request in enumerate(chosen):
            length = int(seq_lens[row])
            picks = torch.randperm(-(-length // block), generator=subject.generator)[: TOPK // block - row % 2]
            top_k[row, : picks.numel()] = picks
            tokens = [b * block + i if b >= 0 else -1 for b in top_k[row].tolist() for i in range(block)]
            expected.append((tokens, *subject.expect(request, length, tokens)))
        out = torch.full((rows.shape[0], HOT), 123456, dtype=torch.int32)
        hisparse_swap.load_blocks_to_device_buffer_mha(
            top_k,
            host_cache_k=subject.host,
            host_cache_v=values,
            device_buffer_k=subject.device,
            device_buffer_v=device_values,
            top_k_device_locs=out,
            req_pool_indices=rows.int(),
            seq_lens=seq_lens,
            item_size_bytes=24,
            hot_buffer_size=HOT,
            sparse_block_size=block,
            num_real_reqs=real,
            skip_io=skip_io,
            **subject.tables(),
        )
        for row, (request, (tokens, locs, copies)) in enumerate(zip(chosen, expected, strict=True)):
            assert out[row, :TOPK].tolist() == locs
            if skip_io:
                continue
            subject.check_rows(request, tokens, locs)
            for source, target in copies:
                assert torch.equal(device_values[target], values[source])
        assert bool((out[len(chosen) :, :TOPK] == -1).all())
        subject.check_state()
    if skip_io:
        assert bool(device_values.isnan().all())


def test_page_padded_pools_of_deepseek_v4() -> None:
    subject, pages = world(3), 12
    host = torch.randint(0, 256, (pages, 37440), dtype=torch.uint8, generator=subject.generator)
    device = torch.zeros(4, 37440, dtype=torch.uint8)
    subject.host_locs %= pages * 64
    subject.tokens[:, :HOT] = -1
    before = device.clone()
    out = torch.empty(2, TOPK, dtype=torch.int32)
    wanted = torch.tensor([subject.wanted(70, TOPK), subject.wanted(80, TOPK)], dtype=torch.int32)
    hisparse_swap.load_cache_to_device_buffer_dsv4_mla(
        wanted,
        host_cache=host,
        device_buffer=device,
        top_k_device_locs=out,
        req_pool_indices=torch.tensor([1, 4]),
        seq_lens=torch.tensor([CONTEXT, CONTEXT]),
        item_size_bytes=584,
        num_top_k=TOPK,
        hot_buffer_size=HOT,
        **subject.tables(),
    )
    for row, request in enumerate((1, 4)):
        for token, loc in zip(wanted[row].tolist(), out[row].tolist(), strict=True):
            assert torch.equal(_dsv4_item(device, loc), _dsv4_item(host, int(subject.host_locs[request, token])))
            before[loc // 64, _dsv4_bytes(loc)] = device[loc // 64, _dsv4_bytes(loc)]
    assert torch.equal(before, device)  # nothing else was written
    with pytest.raises(MountError, match=r"raw addresses.*--enable-hisparse"):
        hisparse_swap.transfer_cache_dsv4_mla(out, out, out, out)


def _dsv4_bytes(row: int) -> Tensor:
    offset = row % 64
    value, scale = torch.arange(576) + offset * 576, torch.arange(8) + 64 * 576 + offset * 8
    return torch.cat([value, scale])


def _dsv4_item(pool: Tensor, row: int) -> Tensor:
    return pool[row // 64, _dsv4_bytes(row)]


@pytest.mark.parametrize(("topk", "scratch"), [(6, 4), (12, 20), (16, 32)])
def test_speculative_steps(topk: int, scratch: int) -> None:
    """Tokens of three steps at once, their union below and above the hot size; the newest are in the page behind."""
    steps = 3
    subject = world(4)
    free = subject.device.shape[0]
    subject.device = torch.cat([subject.device, torch.full((REQUESTS * scratch, *subject.row), torch.nan)])
    state = SimpleNamespace(
        cache_policy=torch.zeros(REQUESTS + 1, HOT, dtype=torch.int32),
        scratch_locs=(free + torch.arange(REQUESTS * scratch)).view(REQUESTS, scratch).int(),
    )
    owned = [set(subject.locs[r].tolist()) | set(state.scratch_locs[r].tolist()) for r in range(REQUESTS)]
    lengths = [4, HOT - 2, HOT, 30, 60, 80]
    for trip in range(30):
        chosen = torch.randperm(REQUESTS, generator=subject.generator)[: 1 + trip % REQUESTS].tolist()
        rows = torch.tensor([*chosen, 0])
        top_k = torch.full((len(rows), steps, topk), 5, dtype=torch.int32)
        seq_lens = torch.full((len(rows), steps), CONTEXT, dtype=torch.int32)
        for row, request in enumerate(chosen):
            first = min(lengths[request], CONTEXT - steps)
            lengths[request] = first + 1
            for step in range(steps):
                token = first + step
                subject.tokens[request, HOT + 1 + step] = token
                where = subject.locs[request, HOT + 1 + step].long()
                subject.device[where] = subject.host[subject.host_locs[request, token]]
                seq_lens[row, step] = token + 1
                top_k[row, step] = torch.tensor(subject.wanted(token + 1, topk), dtype=torch.int32)
            if first < HOT:  # accepted tokens of a short request lie in their own slots
                slot = subject.locs[request, first].long()
                subject.device[slot] = subject.host[subject.host_locs[request, first]]
        out = torch.full((len(rows), steps, topk), 123456, dtype=torch.int32)
        src = torch.full((len(rows), steps * topk), 999)
        dst, count = src.int(), torch.full((len(rows),), 77, dtype=torch.int32)
        before = subject.device.clone()
        tables = subject.tables()
        del tables["lru_slots"]
        hisparse_spec.load_cache_to_device_buffer_spec_mla(
            top_k_tokens=top_k,
            host_cache=subject.host,
            device_buffer=subject.device,
            top_k_device_locs=out,
            req_pool_indices=rows,
            seq_lens=seq_lens.flatten(),
            state=state,
            num_real_reqs=torch.tensor([len(chosen)], dtype=torch.int32),
            miss_src=src,
            miss_dst=dst,
            miss_count=count,
            **tables,
        )
        assert bool((out[-1] == 0).all())
        assert count[-1] == 0
        for row, request in enumerate(chosen):
            for step in range(steps):
                wanted, locs = top_k[row, step].tolist(), out[row, step].tolist()
                assert [loc >= 0 for loc in locs] == [token >= 0 for token in wanted]
                subject.check_rows(request, wanted, locs)
            assert set(subject.locs[request].tolist()) | set(state.scratch_locs[request].tolist()) == owned[request]
            assert sorted(state.cache_policy[1 + request].tolist()) == list(range(HOT))
            n = int(count[row])
            assert len(set(src[row, :n].tolist())) == n  # each token crosses once
            before[dst[row, :n].long()] = subject.host[src[row, :n]]
        assert torch.equal(before.nan_to_num(7), subject.device.nan_to_num(7))  # the plan is all that was written
        for request in range(REQUESTS):  # a hot slot holds what the table says
            for slot, token in enumerate(subject.tokens[request, :HOT].tolist()):
                if token < lengths[request] and (lengths[request] > HOT or token < lengths[request] - 1):
                    held = subject.device[subject.locs[request, slot].long()]
                    assert torch.equal(held, subject.host[subject.host_locs[request, token]])


def test_misses_can_fly_while_hits_are_attended() -> None:
    subject = world(5)
    tokens = torch.tensor([[0, 40, 3, 59, -1, 41, 7]], dtype=torch.int32)
    subject.grow(4, 60)
    before = COUNTS.read()
    out = torch.empty_like(tokens)
    with hisparse_swap.deferred_copies(Lane(torch.device("cpu"))) as copies:
        hisparse_swap.load_cache_to_device_buffer_mla(
            tokens,
            host_cache=subject.host,
            device_buffer=subject.device,
            top_k_device_locs=out,
            req_pool_indices=torch.tensor([4]),
            seq_lens=torch.tensor([60]),
            item_size_bytes=20,
            num_top_k=7,
            hot_buffer_size=HOT,
            **subject.tables(),
        )
    copies.join()
    assert copies.missed is not None
    assert copies.missed.tolist() == [[False, True, False, False, False, True, False]]
    subject.check_rows(4, tokens[0].tolist(), out[0].tolist())
    after = COUNTS.read()
    added = {name: after[name] - before[name] for name in after}
    assert added == {"hits": 3, "misses": 2, "swapped_rows": 2, "swapped_bytes": 40}


def test_what_cannot_be_right_is_refused() -> None:
    subject = world(6)
    arguments = {
        "host_cache": subject.host,
        "device_buffer": subject.device,
        "top_k_device_locs": torch.empty(1, TOPK, dtype=torch.int32),
        "req_pool_indices": torch.tensor([1]),
        "seq_lens": torch.tensor([80]),
        "hot_buffer_size": HOT,
        **subject.tables(),
    }
    tokens = torch.arange(40, 40 + TOPK, dtype=torch.int32)[None]
    swap = hisparse_swap.load_cache_to_device_buffer_mla
    with pytest.raises(MountError, match="expected 24 bytes, got 20"):
        swap(tokens, item_size_bytes=24, num_top_k=TOPK, **arguments)
    with pytest.raises(MountError, match="at least the 17 selected tokens, got 16"):
        swap(torch.zeros(1, 17, dtype=torch.int32), item_size_bytes=20, num_top_k=17, **arguments)
    subject.check_state()
    subject.host_locs[1, 45] = -1
    with pytest.raises(MountError, match="1 wanted tokens are neither in the hot buffer nor in host memory"):
        swap(tokens, item_size_bytes=20, num_top_k=TOPK, **arguments)
