"""A decode step of one DeepSeek-V3.2 layer with HiSparse, from the indexer's top-k to the layer's output.

`baige-device bench hisparse_step` verifies and times; `python benchmarks/bench_hisparse_step.py --out PATH` also works
out how much of the swap is hidden, and draws its own picture.
`BENCH_SGLANG_LIB` names SGLang's kernel (see `hisparse_peer.py`); FlashMLA comes from `sgl-flash-mla`.

A step is [q_b_proj, W_UK] -> sparse attention -> [W_UV, o_proj]; the top-k is there before it. With `indexer` in its
name it begins with the indexer, whose stand-in reads its keys once: the least that scoring can take.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baige_device.cli.bench_case import BenchCase, Peer
from baige_device.cli.bench_report import Report, Result, environment, print_row
from baige_device.cli.bench_timing import Limits, measure_limits, time_us
from benchmarks.hisparse_layer import CONTEXTS, ROW_BYTES, TOPK
from benchmarks.hisparse_scene import Scene

OPS = ("hisparse_step",)
ON_DEVICE, SGLANG, SERIAL = "all on the device", "SGLang swap-in", "ours, swap then attend"
EARLY = "ours, early swap"
_GRID = (
    *(("60K", batch, 90) for batch in (128, 64, 8, 32, 256)),
    *(("60K", batch, rate) for batch in (128, 32) for rate in (80, 95)),
    *(("200K", batch, 90) for batch in (128, 64, 8, 32)),
    *(("200K", batch, rate) for batch in (128, 32) for rate in (80, 95)),
)
"""Context, batch and percent of hits, most telling first."""
_COPY_SMS = 6
"""Multiprocessors of the copy; attention leaves as many of its parts free."""
_Way = Callable[[int], object]


def cases(begin: int = 0) -> Iterator[BenchCase]:
    """The grid from one of its rows on."""
    torch.manual_seed(begin)
    for context, batch, rate in _GRID[begin:]:
        yield from _cases_of(context, batch, rate)


def _cases_of(context: str, batch: int, rate: int) -> Iterator[BenchCase]:
    misses = round(TOPK * (100 - rate) / 100)
    scene = Scene(batch, misses, CONTEXTS[context])
    name = f"{context} context, batch {batch}, {rate} % hits"
    fast = partial(scene.swapped, early=True, overlap=True)
    peers: dict[str, _Way] = {
        ON_DEVICE: scene.on_device,
        SERIAL: scene.swapped,
        EARLY: partial(scene.swapped, early=True),
    }
    if scene.sglang is not None:
        peers[SGLANG] = scene.with_sglang
    if rate == 90:
        peers["ours, overlap, nothing reserved"] = fast
        peers["ours, overlap, 5 SMs"] = partial(fast, max_sms=5)
        peers["ours, overlap, two waves of 5 SMs"] = partial(fast, waves=scene.waves(), max_sms=5)
    yield _case(scene, name, partial(fast, max_sms=_COPY_SMS), peers, rate)
    if rate == 90:
        with_indexer: dict[str, _Way] = {
            ON_DEVICE: partial(scene.on_device, indexer=True),
            SERIAL: partial(scene.swapped, indexer=True),
            EARLY: partial(scene.swapped, indexer=True, early=True),
        }
        yield _case(
            scene, f"{name}, indexer, in halves", partial(scene.in_halves, max_sms=_COPY_SMS), with_indexer, rate
        )


def _case(scene: Scene, name: str, run: _Way, peers: dict[str, _Way], rate: int) -> BenchCase:
    return BenchCase(
        "hisparse_step",
        name,
        run,
        scene.verify,
        scene.batch * scene.misses * ROW_BYTES,
        "link",
        len(scene.topk),
        "tuned",
        peers=tuple(Peer(peer, way, lambda: None) for peer, way in peers.items()),  # `verify` compares them all
        facts={
            "batch": scene.batch,
            "context": next(name for name, tokens in CONTEXTS.items() if tokens == scene.context),
            "context_tokens": scene.context,
            "hit_percent": rate,
            "indexer": "indexer" in name,
            "series": f"batch {scene.batch}, {rate} % hits{', indexer' if 'indexer' in name else ''}",
        },
    )


def measure(case: BenchCase, limits: Limits) -> Result:
    """Verify and time one case and its peers."""
    case.verify()
    us = time_us(case.run, case.sets)
    peers = {peer.name: time_us(peer.run, case.sets) for peer in case.peers}
    facts = {**case.facts, **hidden(us, peers)}
    return Result(case.op, case.case, us, peers, limits.share(case.limit, case.work, us), case.limit, case.tier, facts)


def hidden(us: float, peers: dict[str, float]) -> dict[str, float]:
    """What the swap costs when nothing is hidden, and the percent of it that each way hides."""
    swap = peers.get(SERIAL, 0.0) - peers.get(ON_DEVICE, 0.0)
    if swap <= 0 or ON_DEVICE not in peers:
        return {}
    ways = {"overlap": us} | {name: its for name, its in peers.items() if name.startswith("ours, ") and name != SERIAL}
    shares = {
        f"hidden_percent_{way.removeprefix('ours, ').replace(', ', '_').replace(' ', '_')}": round(
            100 * (peers[SERIAL] - its) / swap, 1
        )
        for way, its in ways.items()
    }
    return {"swap_us": round(swap, 1), **shares}


def main() -> int:
    """Returns 0, or 3 when a capture failed: the process cannot capture any more, `--begin` goes on in a new one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hisparse_step"), help="without suffix")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so much time")
    parser.add_argument("--begin", type=int, default=0, help="row of the grid to begin with")
    arguments = parser.parse_args()
    began = time.monotonic()
    limits = measure_limits()
    print(f"host link {limits.link / 1e9:.1f} GB/s", flush=True)
    results: list[Result] = []
    status = 0
    for case in cases(arguments.begin):
        if time.monotonic() - began > arguments.seconds:
            print(f"out of time in front of {case.case}")
            break
        if arguments.match not in case.case:
            continue
        try:
            results.append(measure(case, limits))
        except AssertionError as error:
            print(f"{case.case} failed: {error}", flush=True)
            continue
        except RuntimeError:
            print(f"{case.case} failed:\n{traceback.format_exc()}", flush=True)
            row = (case.facts["context"], case.facts["batch"], case.facts["hit_percent"])
            print(f"go on with --begin {_GRID.index(row) + 1}", flush=True)
            status = 3
            break
        print_row(results[-1])
        print("     ", {k: v for k, v in results[-1].facts.items() if "_us" in k or "hidden" in k}, flush=True)
    if results:
        Report(environment(), limits, results).write(arguments.out)
        draw(results, arguments.out.with_name(arguments.out.name + "_hidden.png"))
    return status


def draw(results: list[Result], path: Path) -> None:
    """Step times by batch for each context, and the hidden part of the swap beside them, at 90 % hits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(18, 4.5))
    shown = sorted((r for r in results if r.facts["hit_percent"] == 90 and "swap_us" in r.facts), key=_batch)
    for axis, (context, tokens) in zip(axes, CONTEXTS.items(), strict=False):
        rows = [r for r in shown if r.facts["context_tokens"] == tokens and not r.facts["indexer"]]
        for name in (ON_DEVICE, SGLANG, SERIAL, EARLY):
            axis.plot([_batch(r) for r in rows], [r.peers_us.get(name) for r in rows], marker="o", label=name)
        axis.plot([_batch(r) for r in rows], [r.us for r in rows], marker="s", label="ours, overlap")
        axis.set_title(f"{context} context: a layer's step in us", fontsize=9)
    for context, tokens in CONTEXTS.items():
        for indexer in (False, True):
            rows = [r for r in shown if r.facts["context_tokens"] == tokens and r.facts["indexer"] == indexer]
            label = f"{context}, with the indexer, in halves" if indexer else context
            shares = [r.facts["hidden_percent_overlap"] for r in rows]
            axes[2].plot([_batch(r) for r in rows], shares, marker="o", label=label)
    axes[2].set_title("percent of the swap hidden, 90 % hits", fontsize=9)
    for axis in axes:
        axis.set_xlabel("batch")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _batch(result: Result) -> int:
    return int(result.facts["batch"])


if __name__ == "__main__":
    sys.exit(main())
