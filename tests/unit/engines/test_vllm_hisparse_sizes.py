"""How many blocks vLLM gets from a device's budget and a host pool, and the errors of sizes that cannot work."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from baige_device.engines.vllm.hisparse_sizes import HostSizes, local_ranks
from baige_device.errors import HostMemoryError
from baige_device.optimizations.hisparse.footprint import footprint
from baige_device.settings import HiSparseSettings

MIB = 1 << 20
SIZES = HostSizes(
    layer_groups=(0, 0, 2),
    row_bytes=1152,
    index_block_bytes=2 * 64 * 256,  # two of the three layers have an indexer
    block_tokens=64,
    topk=128,
    hot_tokens=256,
    max_requests=4,
    max_context_tokens=4096,
    batched_tokens=512,
    host_bytes=100 * 3 * 64 * 1152,
)
FIXED = footprint(SIZES.config(1), SIZES.staged_tokens).total_bytes


def test_the_smaller_memory_decides() -> None:
    assert SIZES.host_blocks == 100
    assert SIZES.staged_tokens == 512 + 4096
    assert SIZES.blocks(FIXED + 1000 * SIZES.index_block_bytes, 4096)[0] == 100
    blocks, text = SIZES.blocks(FIXED + 70 * SIZES.index_block_bytes + 1, 4096)
    assert blocks == 70
    assert "blocks: min = 70 of 64 tokens" in text


def test_a_side_that_holds_no_longest_request_is_named() -> None:
    with pytest.raises(HostMemoryError, match=r"^hisparse: the device's KV budget: a request of 4096 tokens"):
        SIZES.blocks(FIXED + 64 * SIZES.index_block_bytes, 4096)
    with pytest.raises(HostMemoryError, match=r"index keys of 0 blocks"):
        SIZES.blocks(FIXED - 1, 4096)
    small = dataclasses.replace(SIZES, host_bytes=64 * SIZES.host_block_bytes)
    with pytest.raises(HostMemoryError, match=r"^hisparse\.host_gib_per_node: a request of 4096 tokens .* 64 blocks"):
        small.blocks(1 << 40, 4096)


def test_the_cache_has_vllms_blocks_as_pages() -> None:
    config = SIZES.config(70)
    assert (config.host_pages, config.page_tokens, config.groups) == (70, 64, (0, 0, 1))


def test_long_contexts_bound_the_staging() -> None:
    million = dataclasses.replace(SIZES, max_context_tokens=1 << 20)
    assert million.staged_tokens == 512 + (1 << 18)


def test_ranks_of_a_node_and_the_plan() -> None:
    assert local_ranks(SimpleNamespace(local_world_size=4, data_parallel_size_local=2)) == 8
    assert local_ranks(SimpleNamespace(local_world_size=1, data_parallel_size_local=0)) == 1
    settings = HiSparseSettings(host_gib_per_node=1)
    plan = SIZES.plan(settings, 2, 64 * MIB, {})
    assert "host pool: 1 GiB a node / 2 ranks = 0.5 GiB a rank" in plan.explain()
    on_a_fast_link = SIZES.plan(settings, 2, 64 * MIB, {"link_bytes_per_s": 90e9})
    assert on_a_fast_link.swap_us_per_layer == pytest.approx(plan.swap_us_per_layer / 2)
