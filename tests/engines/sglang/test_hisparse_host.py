"""HiSparse's real host pool over memory of ours: backup, preload, budget and release."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.activation import activate, deactivate
from baige_device.engines.sglang import hisparse_host
from baige_device.errors import MountError
from baige_device.settings import Settings
from tests.engines.sglang.host import prepare

prepare()  # before the first import of SGLang in this process

LAYERS, TOKENS, ROW = 3, 256, 64 + 16


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    torch.manual_seed(0)
    deactivate()
    activate(Settings(backend="reference", checks="values"))
    yield
    deactivate()


def pools(budget_bytes: int = 0, start_layer: int = 0) -> tuple[Any, Any]:
    """The device pool and the host pool, made as SGLang's coordinator makes them."""
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    from baige_device.engines.sglang.pool import BaigeHiSparsePool

    device = BaigeHiSparsePool(
        TOKENS,
        page_size=64,
        kv_lora_rank=64,
        dtype=torch.float32,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=ROW,
        start_layer=start_layer,
        end_layer=start_layer + LAYERS,
    )
    with hisparse_host.host_memory("cpu", budget_bytes):
        host = MLATokenToKVPoolHost(
            buffer_info=device.get_device_pool_infos()[0].buffer_info,
            device_capacity_tokens=TOKENS,
            start_layer=device.start_layer,
            end_layer=device.end_layer,
            target_layer_num=LAYERS,
            host_to_device_ratio=2,
            host_size=0,
            page_size=64,
            layout="layer_first",
            override_kv_cache_dim=ROW,
        )
    return device, host


def sglangs_own(*arguments: Any, **options: Any) -> None:
    raise AssertionError("SGLang's own transfer needs a GPU")


@pytest.mark.parametrize("start_layer", [0, 5])
def test_rows_come_back_as_they_went(start_layer: int) -> None:
    device, host = pools(start_layer=start_layer)
    for buffer in device.kv_buffer:
        buffer.copy_(torch.randn_like(buffer))
    kept = [buffer.clone() for buffer in device.kv_buffer]
    there, here = torch.randperm(host.size)[:37], torch.randperm(TOKENS)[:37]
    hisparse_host.backup_all_layers(sglangs_own, host, device, there, here, io_backend="kernel")
    target = torch.randperm(TOKENS)[:37]
    for layer in range(LAYERS):
        device.kv_buffer[layer].fill_(7)
        hisparse_host.load_layer(sglangs_own, host, device, there, target, layer, io_backend="kernel")
        expected = torch.full_like(kept[layer], 7)
        expected[target] = kept[layer][here]
        assert torch.equal(device.kv_buffer[layer], expected)
    with pytest.raises(MountError, match="io backend kernel, got layer_first, direct"):
        hisparse_host.backup_all_layers(sglangs_own, host, device, there, here, io_backend="direct")
    released = []
    hisparse_host.destroy(lambda pool: released.append(pool.pin_memory) or setattr(pool, "kv_buffer", None), host)
    assert released == [False]
    assert not hisparse_host._buffers
    hisparse_host.destroy(lambda pool: released.append("again"), host)
    assert released == [False, "again"]


def test_the_budget_is_kept_and_nothing_is_left_behind() -> None:
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    needed = LAYERS * (2 * TOKENS + 64) * ROW * 4
    before = dict(ALLOC_MEMORY_FUNCS)
    with pytest.raises(MountError, match=f"takes {needed} bytes on this rank.*leaves it {needed - 1}"):
        pools(needed - 1)
    assert dict(ALLOC_MEMORY_FUNCS) == before
    device, host = pools(needed)
    hisparse_host.destroy(lambda pool: None, host)
    with pytest.raises(RuntimeError, match="later"):
        fail_after_an_allocation()
    assert not hisparse_host._buffers
    assert device.index_key_cache.buffer[0].dtype == torch.float32


def fail_after_an_allocation() -> None:
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    with hisparse_host.host_memory("cpu"):
        ALLOC_MEMORY_FUNCS["cpu"]((4, 4), dtype=torch.float32)
        raise RuntimeError("later")


def test_other_pools_go_the_way_of_sglang() -> None:
    _, host = pools()
    kept, host.kv_buffer = host.kv_buffer, torch.zeros(1)
    seen: list[str] = []
    rows = torch.tensor([1])
    hisparse_host.backup_all_layers(lambda *a: seen.append("backup"), host, None, rows, rows, "kernel")
    hisparse_host.load_layer(lambda *a, **k: seen.append("load"), host, None, rows, rows, 0, "kernel")
    hisparse_host.destroy(lambda pool: seen.append("destroy"), host)
    assert seen == ["backup", "load", "destroy"]
    host.kv_buffer = kept
    hisparse_host.destroy(lambda pool: None, host)


def test_sglangs_refusal_is_lifted_for_one_pool_only() -> None:
    from sglang.srt.platforms import interface

    from baige_device.engines.sglang.hisparse import SERVED_POOL, _refuse_others

    class Outside:
        device_name = "abacus"

        def is_out_of_tree(self) -> bool:
            return True

    refuse = _refuse_others(interface.reject_out_of_tree_path)
    refuse(Outside(), subsystem=SERVED_POOL)
    for other in ("the DeepSeek-V4 KV pool", "the MiniMax sparse-index KV pool", "the CP layer-split DSA KV pool"):
        with pytest.raises(NotImplementedError, match=other):
            refuse(Outside(), subsystem=other)


def test_layers_of_a_pipeline_stage_are_counted_from_its_first() -> None:
    from baige_device.engines.sglang.hisparse_attend import HiSparseRows

    swapped: list[int] = []

    def swap_in(requests: torch.Tensor, seq_lens: torch.Tensor, topk: torch.Tensor, layer: int) -> torch.Tensor:
        swapped.append(layer)
        return topk + 100

    coordinator = SimpleNamespace(device="cpu", swap_in_selected_pages=swap_in)
    subject = HiSparseRows(coordinator, SimpleNamespace(start_layer=5), overlap=False)
    step = SimpleNamespace(req_pool_indices=torch.tensor([3]), seq_lens=torch.tensor([9]))
    topk = torch.tensor([[4, 7], [1, 1]])  # the second token pads the step
    attended = subject.attend(lambda rows: (rows, rows), lambda *parts: parts[:2], topk, 6, step)
    assert swapped == [1]
    assert attended.tolist() == [[104, 107], [-1, -1]]
