"""MoE between ranks on each transport: the kit's cases, the choice and its reason, and broken preconditions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import kunlun_emulator
import pytest
import torch
import torch.distributed as dist
from kunlun_emulator.install import DEEP_EP_SITE, SITE
from torch import Tensor

from baige_device.backends.kunlun import moe, moe_deep_ep, moe_exchange, normalise, vendor
from baige_device.backends.kunlun.limits import Limit
from baige_device.errors import ContractError
from baige_device.ops.moe_dispatch.contract import LAYOUTS
from baige_device.registry.offers import Need
from baige_device.registry.resolve import resolve
from baige_device.testing import RankOptions, open_backend, run_ranks
from tests.unit.dist import spawn_ranks

Chip = kunlun_emulator.STATE.__class__
_TESTS = SITE.parent.parent


@pytest.fixture
def ranks_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give spawned ranks a vendor profile."""

    def choose(profile: str) -> None:
        paths = [SITE, *([DEEP_EP_SITE] if profile.startswith("deep_ep") else []), _TESTS]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("KUNLUN_EMULATOR_PROFILE", profile)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        for path in paths:
            monkeypatch.syspath_prepend(str(path))

    return choose


def test_conformance_by_all_gather_and_reduce_scatter(ranks_on: Callable[[str], None]) -> None:
    """`TestRanks` runs the same cases by all_to_all_single, which raises in this profile."""
    ranks_on("no_all_to_all")
    outcomes = run_ranks(RankOptions("kunlun", 2, seed=5, ops=("moe_dispatch", "moe_combine")))
    assert not [(item.case, item.reason) for item in outcomes if item.status == "failed"]
    count = Counter(item.status for item in outcomes)
    assert count["refused"] == 3, "float8 payloads, one a layout"
    assert count["passed"] == len(outcomes) - 3


def _world(rank: int, hidden: int = 64) -> dict[str, Any]:
    """Int8 rows; token 0 has no expert, and expert ids repeat nowhere."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 6 + 3 * rank
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(tokens)]).int()
    ids[0], ids[1, 1:] = -1, -1
    return {
        "x": torch.randint(-127, 128, (tokens, hidden), generator=generator).to(torch.int8),
        "topk_ids": ids,
        "topk_weights": torch.rand(tokens, 3, generator=generator) + 0.1,
        "x_scales": torch.rand(tokens, 1, generator=generator) + 0.1,
        "num_experts": 8,
        "max_tokens_per_rank": 12,
    }


def _against_float64(ops: Any, dtype: torch.dtype, layout: str) -> None:
    """Expert e answers (e + 1) times the decoded row; combine must give the weighted sum of that."""
    rank = dist.get_rank()
    world = _world(rank)
    batch = ops.moe_dispatch(**world, layout=layout)
    decoded = batch.x.double() * batch.scales.double()
    if layout == "masked":
        factor = torch.arange(4).view(4, 1, 1) + 4 * rank + 1
    elif layout == "expert_major":
        owner = torch.repeat_interleave(torch.arange(4), batch.expert_starts.diff().long(), output_size=len(batch.x))
        factor = owner.unsqueeze(1) + 4 * rank + 1
    else:
        per_choice = torch.where(batch.topk_ids >= 0, (batch.topk_ids + 4 * rank + 1) * batch.topk_weights, 0)
        factor = per_choice.sum(1, keepdim=True)
    got = ops.moe_combine((decoded * factor).to(dtype), batch)
    live = torch.where(world["topk_ids"] >= 0, (world["topk_ids"] + 1) * world["topk_weights"].double(), 0)
    rows = world["x"].double() * world["x_scales"].double()
    want = rows * live.sum(1, keepdim=True)
    assert got.dtype == dtype
    assert not got[0].any(), "a token without an expert gets zeros"
    # Each of two ranks rounds products and sums once, and the total is rounded once; weights are positive.
    assert bool(((got.double() - want).abs() <= 4 * torch.finfo(dtype).eps * want.abs() + 1e-30).all())


class _Ops:
    moe_dispatch = staticmethod(moe_deep_ep.moe_dispatch)
    moe_combine = staticmethod(moe.moe_combine)


def _deep_ep_worker(layouts: tuple[str, ...]) -> dict[str, Any]:
    import torch_xmlir

    assert torch_xmlir.__emulator__
    calls = kunlun_emulator.STATE.calls
    with kunlun_emulator.chip_rules():
        for layout in layouts:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                _against_float64(_Ops, dtype, layout)
    why = moe_deep_ep.refusal(None, 64, 8)
    return {"dispatch": calls["dispatch"], "combine": calls["combine"], "why": why}


def test_deep_ep_carries_int8_rows(ranks_on: Callable[[str], None]) -> None:
    ranks_on("deep_ep")
    for found in spawn_ranks(2, _deep_ep_worker, LAYOUTS):
        assert found == {"dispatch": 10, "combine": 4, "why": ""}, "one proof, nine dispatches, three in bf16"


def test_a_build_with_another_order_takes_all_to_all_on_every_rank(ranks_on: Callable[[str], None]) -> None:
    ranks_on("deep_ep_by_token")
    found = spawn_ranks(2, _deep_ep_worker, LAYOUTS[:1])
    for item in found:
        assert (item["dispatch"], item["combine"]) == (1, 1), "the proof only"
        assert item["why"].startswith("all_to_all_single: deep_ep moves rows differently on ranks")
        assert "another order than (source rank, token)" in item["why"]


def test_conformance_with_deep_ep(ranks_on: Callable[[str], None]) -> None:
    """The int8 cases go by deep_ep and the others by all_to_all_single; each combine checks its dispatch as well."""
    ranks_on("deep_ep")
    outcomes = run_ranks(RankOptions("kunlun", 2, seed=5, ops=("moe_combine",)))
    assert {item.status for item in outcomes} == {"passed"}, [(item.case, item.reason) for item in outcomes]


@pytest.mark.parametrize("chip", ["deep_ep", "torch2.9"], indirect=True)
def test_the_offer_says_which_transport_and_why(chip: Chip) -> None:
    backend, device = open_backend("kunlun")
    deep, plain = backend.offers("moe_dispatch", device)
    assert bool(deep.available) is ("deep_ep" in chip.profile.modules)
    assert deep.available or "lacks deep_ep.dispatch" in deep.available.reason
    assert "deep_ep_exchange" in deep.facts["transport"]
    assert plain.facts["transport"].startswith("all_to_all_single: a group's backend 'gloo' is one of nccl")
    int8 = {"dtype": "int8", "scale_blocks": 1, "layout": "flat"}
    chosen = resolve(backend, device, [Need("moe_dispatch", "t", int8)])["moe_dispatch"].chosen
    assert chosen is not None
    assert chosen.offer.label == (deep if deep.available else plain).label
    for params, served in (
        (int8, True),
        ({**int8, "ranks": 1}, False),
        ({**int8, "dtype": "bfloat16"}, False),
        ({**int8, "scale_blocks": 2}, False),
        ({**int8, "graph": True}, False),
    ):
        assert bool(deep.supports(Need("moe_dispatch", "t", params))) is served


def test_the_rule_names_the_backend() -> None:
    assert moe_exchange.reason("other").startswith("all_gather and reduce_scatter: a group's backend 'other'")


def test_deep_ep_refuses_other_payloads(chip: Chip) -> None:
    world = {**_world(0), "layout": "flat"}
    for change in ({"x": world["x"].float()}, {"x_scales": None}, {"x_scales": torch.ones(6, 2)}):
        with pytest.raises(ContractError, match="int8 with x_scales"):
            moe_deep_ep.moe_dispatch(**{**world, **change})


def _set(owner: Any, name: str, new: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, new)


def _own_layout(patch: pytest.MonkeyPatch) -> None:
    library = vendor.deep_ep_buffer()
    real = library.dispatch
    patch.setattr(library, "dispatch", lambda *args, **given: real(*args, **{**given, "num_tokens_per_rank": 1}))


def _always_by_buffer(route: moe_deep_ep.DeepEp, rows: Tensor) -> Tensor:
    home: Tensor = route.buffer.combine(rows, route.handle)[0]
    return home


def _reduced_as_int8(route: moe_exchange.AllGather, rows: Tensor) -> Tensor:
    home = torch.zeros(route.slots, rows.shape[1], dtype=torch.int8)
    dist.reduce_scatter_tensor(home, torch.zeros(2 * route.slots, rows.shape[1], dtype=torch.int8))
    return home


def _small_buffer(group: Any, hidden: int, num_experts: int) -> Any:
    return vendor.deep_ep_buffer()(group, 64, 0, num_experts=num_experts)


def _uneven_experts(group: Any, hidden: int, num_experts: int) -> Any:
    return vendor.deep_ep_buffer()(group, 1 << 20, 0, num_experts=num_experts + 1)


def _low_latency(group: Any, hidden: int, num_experts: int) -> Any:
    return vendor.deep_ep_buffer()(group, 1 << 20, 0, low_latency_mode=True, num_experts=num_experts)


MUTATIONS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "other alignment": ("deep_ep", _set(moe_deep_ep, "DEEP_EP_ALIGNMENT", Limit(64, "", "", "")), "not 128"),
    "ids left int64": ("deep_ep", _set(normalise, "int32", lambda t: t.long()), "topk_idx: torch.int64"),
    "strided rows": ("deep_ep", _set(normalise, "dense", lambda t: t.t().contiguous().t()), "is not contiguous"),
    "a layout of our own": ("deep_ep", _own_layout, "works its layout out itself"),
    "buffer smaller than its hint": ("deep_ep", _set(moe_deep_ep, "_make_buffer", _small_buffer), "num_nvl_bytes"),
    "experts not dealt evenly": ("deep_ep", _set(moe_deep_ep, "_make_buffer", _uneven_experts), "num_experts 9"),
    "low-latency mode": ("deep_ep", _set(moe_deep_ep, "_make_buffer", _low_latency), "only the normal mode"),
    "fp16 through combine": ("deep_ep", _set(moe_deep_ep.DeepEp, "bring_home", _always_by_buffer), "x: torch.float16"),
    "unserved tokens kept": ("deep_ep", _set(moe_deep_ep, "without_unserved", lambda home, served: home), "wrong"),
    "all_to_all on a backend without it": (
        "no_all_to_all",
        _set(moe_exchange, "_has_all_to_all", lambda backend: True),
        "does not support alltoall_base",
    ),
    "int8 sums on the wire": (
        "no_all_to_all",
        _set(moe_exchange.AllGather, "bring_home", _reduced_as_int8),
        "another type",
    ),
}
"""Name -> profile, how the adapter is broken, and what the emulator says (`wrong`: the chip would corrupt silently)."""


def _mutation_worker() -> dict[str, str]:
    """Every mutation of the profile on one pair of ranks: what the emulator said, or `wrong`, or `not caught`."""
    import torch_xmlir

    assert torch_xmlir.__emulator__
    found: dict[str, str] = {}
    profile = kunlun_emulator.STATE.profile.name
    for name, (wanted, apply, _) in MUTATIONS.items():
        if wanted != profile:
            continue
        moe_deep_ep._links.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe_deep_ep, "_prove", lambda *args: "")  # judged before, so no fallback hides the mutation
            apply(patch)
            dispatch = moe.moe_dispatch if profile == "no_all_to_all" else moe_deep_ep.moe_dispatch
            dtype = torch.float16 if "fp16" in name else torch.bfloat16
            try:
                batch = dispatch(**_world(dist.get_rank()), layout="flat")
                got = moe.moe_combine((batch.x.float() * batch.scales).to(dtype), batch)
                found[name] = "not caught" if bool(got.isfinite().all()) else "wrong: rows that nothing wrote"
            except kunlun_emulator.ChipError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("profile", ["deep_ep", "no_all_to_all"])
def test_the_emulator_catches(profile: str, ranks_on: Callable[[str], None]) -> None:
    ranks_on(profile)
    for found in spawn_ranks(2, _mutation_worker):
        wanted = {name: text for name, (at, _, text) in MUTATIONS.items() if at == profile}
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in found[name], f"{name}: {found[name]}"
