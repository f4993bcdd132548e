"""Hot buffers are counted before they grow, and prompts wait for theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.engines.sglang import hisparse_room
from baige_device.errors import MountError

PAGE, HOT = 64, 192


class Pool:
    def __init__(self, size: int, free: int) -> None:
        self.size, self.free = size, free

    def available_size(self) -> int:
        return self.free


class Allocator:
    def __init__(self, size: int, free: int) -> None:
        self.hisparse_attn_allocator = Pool(size, free)


def coordinator(free: int, held: dict[int, int], staged: list[int], size: int = 1024) -> Any:
    """`held`: rows of running requests by their table row. `staged`: lengths of prompts in the queue."""
    sizes = torch.zeros(8, dtype=torch.int64)
    for row, rows in held.items():
        sizes[row] = rows
    acts = [SimpleNamespace(req=SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=tokens))) for tokens in staged]
    subject = SimpleNamespace(
        token_to_kv_pool_allocator=Allocator(size, free),
        ack_staging_queue=acts,
        device_buffer_size=HOT,
        padded_buffer_size=HOT + PAGE,
        page_size=PAGE,
        req_device_buffer_size=sizes,
        spec_swap=SimpleNamespace(enabled=False),
    )
    hisparse_room.watch(subject)
    return subject


def request(row: int, tokens: int) -> Any:
    return SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row, kv_committed_len=tokens))


@pytest.mark.parametrize(
    ("tokens", "held", "needed"),
    [
        (63, 64, 0),
        (64, 64, 64),
        (127, 128, 0),
        (128, 128, 128),
        (192, 256, 0),
        (193, 256, 0),
        (500, 256, 0),
        (64, 0, 0),
    ],
)
def test_a_step_needs_what_the_buffers_grow_by(tokens: int, held: int, needed: int) -> None:
    for free in {needed, max(0, needed - 1)}:
        subject = coordinator(free, {3: held}, [])
        answer = hisparse_room.check_decode_capacity(
            lambda allocator, **asked: True,
            subject.token_to_kv_pool_allocator,
            num_tokens=0,
            requests=[request(3, tokens)],
            tree_cache=None,
        )
        assert answer is (free >= needed)


def test_sglangs_own_check_comes_first_and_other_allocators_are_left_alone() -> None:
    subject = coordinator(0, {3: 64}, [])
    asked = {"num_tokens": 7, "requests": [request(3, 64)], "tree_cache": "cache"}
    seen: list[dict[str, Any]] = []

    def original(allocator: Any, **given: Any) -> bool:
        seen.append(given)
        return True

    check = hisparse_room.check_decode_capacity
    assert not check(original, subject.token_to_kv_pool_allocator, **asked)
    assert check(original, Allocator(1, 0), **asked)
    assert not check(lambda allocator, **given: False, Allocator(1, 1), **asked)
    assert seen == [asked, asked]


def test_prompts_wait_for_room_and_long_ones_make_it() -> None:
    subject = coordinator(0, {1: 256}, [150, 600, 20, 190])
    short, long, tiny, other = subject.ack_staging_queue

    def original(seen: Any) -> list[Any]:
        assert seen.ack_staging_queue == [long, tiny, other]  # 640 rows become 256; 192 rows become 256
        return [seen.ack_staging_queue.pop(0)]

    assert hisparse_room.collect_ready(original, subject) == [long]
    assert subject.ack_staging_queue == [tiny, other, short]


def test_a_pool_that_can_never_give_room_is_an_error() -> None:
    subject = coordinator(0, {}, [190, 180, 150], size=3 * 192)
    with pytest.raises(MountError, match=r"3 prompts fill the device pool of 576 tokens.*--max-total-tokens"):
        hisparse_room.collect_ready(lambda seen: [], subject)
    still_prefilling = coordinator(0, {}, [190, 180, 150], size=3 * 192 + 64)
    assert hisparse_room.collect_ready(lambda seen: [], still_prefilling) == []
    assert len(still_prefilling.ack_staging_queue) == 3
