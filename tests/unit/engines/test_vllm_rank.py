"""A worker's rank among all workers of a vLLM server; it numbers the metrics ports, so two must never be equal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baige_device.engines.vllm.compat import host_rank


@pytest.mark.parametrize("shared", [True, False], ids=["MoE: one world", "dense: a world per replica"])
def test_every_worker_has_a_rank_of_its_own(shared: bool) -> None:
    replicas, size = 3, 2
    found = []
    for replica in range(replicas):
        for rank in range(size):
            # vLLM resets the size and keeps the index for independent replicas.
            parallel = SimpleNamespace(data_parallel_size=replicas if shared else 1, data_parallel_index=replica)
            world = SimpleNamespace(
                world_size=replicas * size if shared else size, rank_in_group=rank + (replica * size if shared else 0)
            )
            found.append(host_rank(parallel, world))
    assert found == list(range(replicas * size))


def test_a_host_without_the_index_counts_its_world() -> None:
    world = SimpleNamespace(world_size=2, rank_in_group=1)
    assert host_rank(SimpleNamespace(data_parallel_size=1), world) == 1
