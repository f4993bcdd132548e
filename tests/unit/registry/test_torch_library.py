"""torch.ops.baige.*: schemas, fakes, aliasing, torch.compile; the active table answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import baige_device
from baige_device.errors import ActivationError
from baige_device.ops import OP_NAMES
from baige_device.registry import torch_library
from baige_device.settings import Settings


def samples() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for every registered op."""
    torch.manual_seed(0)
    rows = torch.tensor([2, -1, 0])
    batch = (torch.tensor([[2, 0], [1, 3]]), torch.tensor([0, 2, 3]), torch.tensor([5, 1]))
    cache = torch.randn(4, 4, 2, 8)
    payload = torch.randint(-100, 100, (5, 6), dtype=torch.int8)
    lists = torch.randint(-1, 16, (3, 2, 5))
    part = torch.randn(3, 4, 8), torch.randn(3, 4)
    return {
        "uva_sparse_gather": ((torch.randn(4, 3), torch.randn(5, 3), rows, rows), {}),
        "uva_sparse_scatter": ((torch.randn(4, 3), torch.randn(5, 3), rows, rows), {"max_sms": 4}),
        "hot_cache_resolve": (
            (torch.tensor([[1, 5]]), torch.tensor([0]), torch.tensor([[5, -1, -1]]), torch.arange(3).int().view(1, 3)),
            {},
        ),
        "quantize_blocks": ((torch.randn(5, 6),), {"block": [2, 4], "wire": "int8_absmax"}),
        "dequantize_blocks": ((payload, torch.rand(3, 2)), {"block": [2, 4], "dtype": torch.float16}),
        "fp8_all_gather": ((torch.ones(7, dtype=torch.uint8), [7]), {}),
        "attend_paged": ((torch.randn(3, 4, 8), cache, None, *batch), {"scale": 0.5, "v_dim": 6}),
        "sparse_attention": ((torch.randn(3, 4, 8), cache, cache, lists), {"scale": 0.5}),
        "merge_attention": ((*part, *part), {}),
        "index_topk": ((torch.randn(3, 4, 8), torch.randn(3, 4), cache[:, :, 0], *batch), {"topk": 3}),
        "kv_write": ((torch.randn(3, 2, 8), cache, rows), {}),
    }


def test_every_op_with_a_schema_is_registered_and_sampled() -> None:
    assert tuple(op for op in OP_NAMES if op in samples()) == torch_library.registered()
    assert set(OP_NAMES) - set(samples()) == {"host_alloc", "moe_dispatch", "moe_expert_ffn", "moe_combine"}


@pytest.mark.parametrize("op", list(samples()))
def test_opcheck(op: str) -> None:
    baige_device.activate(Settings(backend="reference"))
    args, kwargs = samples()[op]
    torch.library.opcheck(getattr(torch.ops.baige, op).default, args, kwargs)


@pytest.mark.parametrize("op", list(samples()))
def test_same_as_the_table(op: str) -> None:
    table = baige_device.activate(Settings(backend="reference")).ops
    (args, kwargs), (same_args, same_kwargs) = samples()[op], samples()[op]
    got = getattr(torch.ops.baige, op)(*args, **kwargs)
    wanted = getattr(table, op)(*same_args, **same_kwargs)
    wanted = wanted.wait() if op == "fp8_all_gather" else wanted
    torch.testing.assert_close(got, tuple(wanted) if isinstance(wanted, tuple) else wanted)
    torch.testing.assert_close(args, same_args)  # what was updated in place
    assert table.calls()[op] == 2


def test_compiles_into_one_graph() -> None:
    table = baige_device.activate(Settings(backend="reference")).ops
    q, cache, (args, kwargs) = torch.randn(3, 4, 8), torch.zeros(4, 4, 2, 8), samples()["attend_paged"]

    def layer(values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        torch.ops.baige.kv_write(values, cache, slots)
        return torch.ops.baige.attend_paged(q, cache, None, *args[3:], **kwargs)[0] * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    values, slots = torch.randn(3, 2, 8), torch.tensor([8, 9, 0])
    out, written = compiled(values, slots), cache.clone()
    torch.testing.assert_close(out, layer(values, slots))
    assert torch.equal(written, cache)
    assert torch.equal(written[2, 0], values[0])
    assert table.calls()["kv_write"] == 2


def test_calls_go_to_the_activation_of_the_moment() -> None:
    first = baige_device.activate(Settings(backend="reference")).ops
    args, _ = samples()["merge_attention"]
    baige_device.deactivate()
    with pytest.raises(ActivationError, match="not active"):
        torch.ops.baige.merge_attention(*args)
    second = baige_device.activate(Settings(backend="reference", checks="none")).ops
    torch.ops.baige.merge_attention(*args)
    assert (first.calls()["merge_attention"], second.calls()["merge_attention"]) == (0, 1)
