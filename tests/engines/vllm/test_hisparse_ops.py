"""vLLM's HiSparse ops over the op table, against a model of dictionaries, and CUDA's translations against both."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baige_device.backends.cuda import nvrtc
from baige_device.backends.cuda.swap_plan import SwapParams, address
from baige_device.engines.vllm import hisparse_ops
from baige_device.errors import ContractError
from tests.engines.vllm.engine import run

pytestmark = pytest.mark.usefixtures("reference")

PAGE, WIDTH, TOPK, HOT, REQUESTS, STATES, LENGTH, STRIDE = 4, 16, 12, 32, 3, 5, 96, 7
HOST_PAGES, DEVICE_PAGES = 120, 90


class World:
    """Pools, tables and states as vLLM's runtime holds them, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        pages = LENGTH // PAGE
        self.host = torch.randn(HOST_PAGES * PAGE, WIDTH)
        self.pool = torch.randn(DEVICE_PAGES, STRIDE, WIDTH)  # pages of one layer between those of others
        self.hot = self.pool[:, :PAGE]
        free = torch.randperm(DEVICE_PAGES - 1)[: REQUESTS * HOT // PAGE + STATES * pages // 4] + 1
        self.hot_table = free[: REQUESTS * HOT // PAGE].view(REQUESTS, -1).int()
        self.source = torch.stack([torch.randperm(HOST_PAGES - 1)[:pages] + 1 for _ in range(REQUESTS)]).int()
        self.residents = free[REQUESTS * HOT // PAGE :].tolist()
        self.resident = torch.zeros(STATES, pages, dtype=torch.int32)
        self.states = torch.tensor([3, 0, 4], dtype=torch.int32)
        self.keys = torch.full((STATES, HOT), -1, dtype=torch.int32)
        self.lru = torch.arange(HOT, dtype=torch.int16).repeat(STATES, 1)
        self.used_at = [[-1] * HOT for _ in range(STATES)]
        self.stats = torch.zeros(2, dtype=torch.uint64)

    def drift(self) -> None:
        """Pages come to the device and leave it, as the host's coordinator decides."""
        state, page = self.dice.choice(self.states.tolist()), self.dice.randrange(LENGTH // PAGE)
        block = int(self.resident[state, page])
        if block:
            self.residents.append(block)
            self.resident[state, page] = 0
        elif self.residents:
            block = self.residents.pop()
            request = self.states.tolist().index(state)
            begin = int(self.source[request, page]) * PAGE
            self.hot[block] = self.host[begin : begin + PAGE]
            self.resident[state, page] = block

    def topk(self, rows: int) -> Tensor:
        lists = [self.dice.sample(range(LENGTH), TOPK) for _ in range(rows)]
        lists[0][-2:] = [-1, -1]
        return torch.tensor(lists, dtype=torch.int32)


class Out:
    """What the op writes, poisoned."""

    def __init__(self, rows: int) -> None:
        def lists() -> Tensor:
            return torch.full((rows, TOPK), -77, dtype=torch.int32)

        self.slots, self.rows, self.host_rows, self.device_rows, self.keys = (lists() for _ in range(5))
        self.counts, self.valid = (torch.full((rows,), -77, dtype=torch.int32) for _ in range(2))


def resolve(world: World, topk: Tensor, requests: Tensor, out: Out) -> None:
    hisparse_ops.resolve_residency(
        world.host,
        world.hot,
        world.hot_table,
        topk,
        out.slots,
        world.keys,
        world.lru,
        world.states,
        HOT,
        TOPK,
        None,
        world.stats,
        out.rows,
        STRIDE,
        requests,
        world.source,
        PAGE,
        out.keys,
        out.valid,
        out.host_rows,
        out.device_rows,
        out.counts,
        world.resident,
        PAGE,
        0,
    )


@pytest.mark.parametrize("seed", range(4))
def test_streams_of_steps_equal_a_dictionary(seed: int) -> None:
    world = World(seed)
    hits = misses = resident = 0
    for step in range(60):
        for _ in range(3):
            world.drift()
        topk = world.topk(REQUESTS + 1)
        requests = torch.tensor([2, 0, 1, -1], dtype=torch.int32)  # the last one is padding
        before = world.keys.clone()
        out = Out(REQUESTS + 1)
        resolve(world, topk, requests, out)
        hisparse_ops.gather_compact(world.host, world.hot, out.host_rows, out.device_rows, out.counts)
        flat = world.pool.reshape(-1, WIDTH)
        for row, request in enumerate(requests.tolist()):
            if request < 0:
                assert out.rows[row].eq(-1).all()
                assert out.counts[row] == 0
                assert out.valid[row] == 0
                continue
            state = int(world.states[request])
            held = {int(key): slot for slot, key in enumerate(before[state].tolist()) if key >= 0}
            wanted: dict[int, int] = {}
            for column, position in enumerate(topk[row].tolist()):
                if position < 0:
                    assert out.rows[row, column] == -1
                    continue
                key = int(world.source[request, position // PAGE]) * PAGE + position % PAGE
                assert torch.equal(flat[int(out.rows[row, column])], world.host[key])
                block = int(world.resident[state, position // PAGE])
                if block:
                    assert out.rows[row, column] == block * STRIDE + position % PAGE
                    assert out.keys[row, column] == -1
                    resident += 1
                else:
                    wanted[key] = int(out.slots[row, column])
            fresh = [key for key in wanted if key not in held]
            assert all(wanted[key] == held[key] for key in wanted if key in held)
            assert int(out.counts[row]) == len(fresh)
            assert sorted(out.host_rows[row, : len(fresh)].tolist()) == sorted(fresh)
            assert out.host_rows[row, len(fresh) :].eq(-1).all()
            assert int(out.valid[row]) == int((topk[row] >= 0).sum())
            _check_victims(world.used_at[state], set(wanted.values()), {wanted[key] for key in fresh}, step)
            assert sorted(world.lru[state].tolist()) == list(range(HOT))
            hits, misses = hits + len(wanted) - len(fresh), misses + len(fresh)
    assert min(hits, misses, resident) > 100
    assert world.stats.tolist() == [hits, misses]


def _check_victims(used_at: list[int], used: set[int], victims: set[int], step: int) -> None:
    """Those evicted were not used in this step and had been used no later than any other that was not."""
    spared = [used_at[slot] for slot in range(HOT) if slot not in used]
    if victims and spared:
        assert max(used_at[slot] for slot in victims) <= min(spared)
    for slot in used:
        used_at[slot] = step


@pytest.mark.parametrize("seed", range(3))
def test_written_slots_are_forgotten_by_their_own_request(seed: int) -> None:
    torch.manual_seed(seed)
    keys = torch.stack([torch.randperm(40)[:HOT] for _ in range(STATES)]).int()
    states = torch.tensor([3, 0, -1], dtype=torch.int32)
    requests = torch.tensor([0, 1, 1, 2, -1, 0], dtype=torch.int32)
    written = torch.tensor([7, 8, 9, 10, 11, 39])
    expected = keys.clone()
    for request, slot in zip(requests.tolist(), written.tolist(), strict=True):
        state = int(states[request]) if request >= 0 else -1
        if state >= 0:
            expected[state][expected[state] == slot] = -1
    hisparse_ops.invalidate_written_slots(keys, states, requests, written)
    assert torch.equal(keys, expected)


def test_a_staging_plan_copies_what_its_mask_names() -> None:
    world = World(0)
    staged = torch.full((4, PAGE, WIDTH), torch.nan)
    rows = torch.tensor([[5, 9, -1, 300, 17]], dtype=torch.int32)
    targets = torch.tensor([[0, 3, 4, 15, 8]], dtype=torch.int32)
    mask = torch.tensor([[1, 0, 0, 1, 1]], dtype=torch.int32)
    hisparse_ops.gather_plan(world.host, staged, rows, targets, mask, None, None, 0)
    flat = staged.view(-1, WIDTH)
    for row, target, wanted in zip(rows[0].tolist(), targets[0].tolist(), mask[0].tolist(), strict=True):
        assert torch.equal(flat[target], world.host[row]) if wanted else flat[target].isnan().all()
    assert flat.isnan().all(1).sum() == len(flat) - 3


def test_forms_that_nobody_uses_are_refused() -> None:
    world, out = World(0), Out(1)
    with pytest.raises(ContractError, match="miss_mask"):
        hisparse_ops.resolve_residency(
            world.host, world.hot, world.hot_table, world.topk(1), out.slots, world.keys, world.lru, None, HOT, TOPK,
            out.rows,
        )  # fmt: skip
    with pytest.raises(ContractError, match="request_state_indices"):
        hisparse_ops.gather_plan(world.host, world.hot, out.rows, out.rows, out.rows, world.states)


def test_the_hosts_own_runtime_runs_over_them() -> None:
    answer = run("hisparse_native", BAIGE_BACKEND="reference").answer
    assert answer["wrong_rows"] == 0
    assert answer["hits"] > 1000
    assert answer["misses"] > 500


SHIM = """
#include <algorithm>
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(n)
using std::max;
static struct { int x; } blockIdx, threadIdx;
static void __syncthreads() {}
static int __syncthreads_count(bool yes) { return yes; }
template <class T> static void atomicAdd(T* to, T value) { *to += value; }
static void atomicOr(unsigned* to, unsigned bits) { *to |= bits; }
unsigned missed[1024];
"""


@pytest.fixture(scope="module", params=[0, 1])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The kernels of `swap_plan.cu` compiled for the host, one thread a block; and whether they split the lists."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder: Path = tmp_path_factory.mktemp("swap_plan")
    loops = "".join(
        f'extern "C" void run_{name}(const Params* p, int rows) '
        f"{{ for (blockIdx.x = 0; blockIdx.x < rows; blockIdx.x++) {name}(*p); }}\n"
        for name in ("to_keys", "to_rows")
    )
    (folder / "plan.cpp").write_text(SHIM + nvrtc.read_source("swap_plan.cu") + loops)
    options = ["-shared", "-fPIC", "-O1", "-std=c++17", "-w", "-DTHREADS=1", f"-DSPLIT={request.param}"]
    subprocess.run([compiler, *options, "-o", str(folder / "plan.so"), str(folder / "plan.cpp")], check=True)
    return folder / "plan.so", bool(request.param)


def test_the_cuda_mounts_swap_over_the_hosts_runtime(library: tuple[Path, bool]) -> None:
    path, split = library
    answer = run("hisparse_native", "split" if split else "swap", str(path), BAIGE_BACKEND="reference").answer
    assert answer["wrong_rows"] == 0
    assert answer["hits"] > 1000
    assert answer["misses"] > 500


@pytest.mark.parametrize("seed", range(3))
def test_cudas_translations_equal_the_torch_ones(library: tuple[Path, bool], seed: int) -> None:
    kernels, split = ctypes.CDLL(str(library[0])), library[1]
    world, twin = World(seed), World(seed)
    valid_rows = torch.tensor([REQUESTS], dtype=torch.int32)
    for _ in range(30):
        world.drift()
        twin.drift()
        topk = world.topk(REQUESTS + 1)
        assert torch.equal(topk, twin.topk(REQUESTS + 1))
        requests = torch.tensor([1, 2, 0, 0], dtype=torch.int32)
        expected, out = Out(REQUESTS + 1), Out(REQUESTS + 1)
        resolve(twin, topk, torch.tensor([1, 2, 0, -1], dtype=torch.int32), expected)
        late, hit = torch.full_like(out.rows, -77), torch.full_like(out.rows, -77)
        states = torch.full((REQUESTS + 1,), -77, dtype=torch.int32)
        miss_slots = torch.full_like(out.rows, -77)
        params = SwapParams()
        for name, tensor in {
            "positions": topk, "requests": requests, "valid_rows": valid_rows, "states": world.states,
            "source_table": world.source, "hot_table": world.hot_table, "resident_table": world.resident,
            "keys": out.keys, "state_rows": states, "rows": out.rows, "slots": out.slots, "miss_slots": miss_slots,
            "miss_counts": out.counts, "miss_rows": out.device_rows, "valid_counts": out.valid, "stats": world.stats,
            "hit_rows": hit, "late_rows": late,
        }.items():  # fmt: skip
            setattr(params, name, address(tensor))
        params.positions_stride, params.source_stride = topk.stride(0), world.source.stride(0)
        params.hot_stride, params.resident_stride = world.hot_table.stride(0), world.resident.stride(0)
        params.wanted, params.page_rows, params.page_stride = TOPK, PAGE, STRIDE
        params.resident_rows, params.resident_null, params.hot_slots = PAGE, 0, HOT
        kernels.run_to_keys(ctypes.byref(params), REQUESTS + 1)
        assert torch.equal(out.keys, expected.keys)
        assert states.tolist() == [*world.states[[1, 2, 0]].tolist(), -1]
        plan = hisparse_ops.current().ops.hot_cache_resolve(out.keys, states, world.keys, world.lru)
        out.slots.copy_(plan.slots)
        miss_slots.copy_(plan.miss_slots)
        out.counts.copy_(plan.miss_counts)
        kernels.run_to_rows(ctypes.byref(params), REQUESTS + 1)
        for name in ("slots", "rows", "device_rows", "counts", "valid"):
            assert torch.equal(getattr(out, name), getattr(expected, name)), name
        assert torch.equal(world.stats.view(torch.int64), twin.stats.view(torch.int64))
        if split:
            _check_split(out, hit, late)


def _check_split(out: Out, hit: Tensor, late: Tensor) -> None:
    for row in range(out.rows.shape[0]):
        count = int(out.counts[row])
        expected = [(at // PAGE) * STRIDE + at % PAGE for at in out.device_rows[row, :count].tolist()]
        assert late[row, :count].tolist() == expected
        assert late[row, count:].eq(-1).all()
        missed = torch.isin(out.rows[row], late[row, :count])
        assert torch.equal(hit[row], torch.where(missed, -1, out.rows[row]))
