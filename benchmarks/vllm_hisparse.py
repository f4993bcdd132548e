"""Decode steps in real vLLM 0.33 on an NVIDIA GPU: its own kernels and HiSparse against ours, in DeepSeek-V3.2's shape.

    python benchmarks/vllm_hisparse.py VARIANT --cases 64x20000,8x20000x3 [--layers 4] [--steps 32] [--eager]
        [--gpu-kv-gib 4] [--drift 0.75] [--equality 4x12000] [--profile] [--out RESULT.json]

One engine start (about half a minute) runs all cases, REQUESTSxCONTEXT[xRUNS] each, of distinct random prompts. A
decode step is the time between two schedules that hold one token of every request; `decode_ms` is the median of the
runs' medians, which `decode_ms_runs` lists. The first case is run once before anything is measured: in a process's
first few hundred steps the host's Python takes a millisecond more a step, in every variant; so let the first case be a
large one. Progress goes to stderr; the last line of stdout is one JSON object:

    {"variant", "settings", "host": {what vLLM decided}, "tied_layers",
     "capacity": {"context", "concurrency", "steady_concurrency", "gpu_kv_gib", "blocks", "host_blocks"},
     "cases": [{"requests", "context", "prefill_s", "decode_ms", "decode_ms_runs", "decode_ms_p90", "running", "hits",
                "misses", "peak_gib", "digest", "schedule"}],
     "equality": [{... of two runs}]}

`--out` also keeps `tokens`, the first ones of each request, and `profile`. `--compare RESULT.json` adds where each
request first differs from that run (`first_difference`, null for nowhere), and whether the scheduler made the same
batches (`same_schedule`).

Tokens of two runs of one variant differ, too: the host's top-k lists its positions in the order in which threads come,
sums follow that order, and random weights leave the two best tokens close. `--equality` runs a case twice without
graphs and with every list sorted. What then differs is not the order: `first_difference_to_itself` is the variant's own
noise, and against another run of the same schedule any difference is one of numbers or of rows.

Variants: `native` and `ours` keep all KV on the device; `native-hisparse`, `ours-hisparse` and `ours-hisparse-overlap`
keep it in host memory. `ours-portable`, `ours-off`, `ours-index`, `ours-hisparse-attention-off`,
`ours-hisparse-mirror-off` and `ours-hisparse-pool-off` switch one op; `ours-hisparse-swap-off` switches lookup and copy
off, and with them mirror and pool. Under HiSparse pages stay on the device while it has room, and nothing is swapped;
so unless `--gpu-kv-gib` says otherwise, the device gets what the largest case needs with its context on the host.

Needs vLLM 0.33, a Hopper GPU, and baige-device installed (its entry points mount it).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from vllm_model import CONFIG, slow_drift, use_variance_keeping_weights, write_config
from vllm_watch import Profiler, Steps

PAGE, ROW_BYTES, INDEX_BYTES, HOT_TOKENS = 64, 656, 132, 4096
PAGE_BYTES = PAGE * ROW_BYTES
BUDGET_TOKENS = 8192

_OFF = {"BAIGE_BACKEND": "off"}
_ON = {"BAIGE_BACKEND": "cuda"}
VARIANTS: dict[str, dict[str, str]] = {
    "native": _OFF,
    "native-hisparse": _OFF,
    "ours": _ON,
    "ours-off": {**_ON, "BAIGE_OPS": "sparse_attention=off"},
    "ours-portable": {**_ON, "BAIGE_OPS": "sparse_attention=portable"},
    "ours-index": {**_ON, "BAIGE_OPS": "index_topk=portable"},
    "ours-hisparse": _ON,
    "ours-hisparse-overlap": {**_ON, "BAIGE_HISPARSE__OVERLAP": "1"},
    "ours-hisparse-attention-off": {**_ON, "BAIGE_OPS": "sparse_attention=off"},
    "ours-hisparse-mirror-off": {**_ON, "BAIGE_OPS": "uva_sparse_scatter=off"},
    "ours-hisparse-pool-off": {**_ON, "BAIGE_OPS": "host_alloc=off"},
    "ours-hisparse-swap-off": {**_ON, "BAIGE_OPS": "hot_cache_resolve=off,uva_sparse_gather=off"},
}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=sorted(VARIANTS))
    parser.add_argument("--cases", default="8x20000", help="REQUESTSxCONTEXT[xRUNS], ...; empty: capacity only")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32, help="full decode steps measured")
    parser.add_argument("--warmup", type=int, default=6, help="full decode steps before them")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--gpu-kv-gib", type=float, default=0.0, help="device memory for KV; 0: see above")
    parser.add_argument("--host-kv-gib", type=float, default=0.0, help="host memory for KV; 0: what the cases need")
    parser.add_argument("--capacity-context", type=int, default=0, help="context that capacity is computed for")
    parser.add_argument("--drift", type=float, default=0.75, help="0: the top-k never changes; 1: random queries")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no case after so many seconds")
    parser.add_argument("--equality", default="", help="REQUESTSxCONTEXT, run twice with sorted lists and no graphs")
    parser.add_argument("--profile", action="store_true", help="profile steps of the last case")
    parser.add_argument("--compare", type=Path, help="result of another variant")
    parser.add_argument("--out", type=Path, help="also write the result there")
    return parser.parse_args()


class Case(NamedTuple):
    """`requests` of `context` tokens each, `runs` times."""

    requests: int
    context: int
    runs: int = 1


def cases_of(text: str) -> list[Case]:
    return [Case(*map(int, case.split("x"))) for case in text.split(",") if case]


def decode_tokens(requests: int, context: int, window: int) -> int:
    """Tokens that the first request generates until the last one is through its prompt, and the window behind."""
    return -(-requests * context // BUDGET_TOKENS) * 2 + window + 16


def device_kv_bytes(cases: Sequence[Case], window: int, layers: int) -> int:
    """What HiSparse needs on the device for the largest case when no context stays there.

    Pages of index keys and of hot buffers, the tails being written, and the pages of two batches of prompts in flight.
    A page of any kind takes one block of the pool.
    """
    most = 0
    for requests, context, _ in cases:
        index = -(-(context + decode_tokens(requests, context, window)) // PAGE)
        hot = layers * (HOT_TOKENS // PAGE + 4)
        most = max(most, requests * (index + hot))
    in_flight = layers * 2 * BUDGET_TOKENS // PAGE
    return int((most + 1.25 * in_flight) * PAGE_BYTES * 1.08)


def make_engine(args: argparse.Namespace, folder: Path) -> Any:
    cases = cases_of(args.cases) + cases_of(args.equality)
    window = args.warmup + args.steps + (40 if args.profile else 0)
    length = max([c + decode_tokens(r, c, window) for r, c, _ in cases], default=0)
    length = max(length, args.capacity_context + 1)
    requests = max((case.requests for case in cases), default=1)
    use_variance_keeping_weights()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    hisparse = "hisparse" in args.variant
    options: dict[str, Any] = {"attention_config": {"backend": "FLASHMLA_SPARSE"}}
    gpu_bytes = int(args.gpu_kv_gib * 2**30)
    if hisparse:
        host = max((r * (c + decode_tokens(r, c, window) + PAGE) for r, c, _ in cases), default=0)
        host_gib = args.host_kv_gib or max(1.0, max(host, 2 * length) * args.layers * ROW_BYTES * 1.1 / 2**30)
        gpu_bytes = gpu_bytes or device_kv_bytes(cases, window, args.layers)
        options["attention_config"]["hisparse_config"] = {}
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="HiSparseConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"host_pool_gib": host_gib},
        )
        log(f"host pool {host_gib:.1f} GiB")
    if gpu_bytes:
        options["kv_cache_memory_bytes"] = gpu_bytes
        log(f"device KV {gpu_bytes / 2**30:.2f} GiB")
    sizes = sorted({case.requests for case in cases_of(args.cases)})
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype="fp8_ds_mla",
        max_model_len=length,
        max_num_seqs=requests,
        max_num_batched_tokens=BUDGET_TOKENS,
        gpu_memory_utilization=0.9,
        enforce_eager=args.eager or not sizes,
        compilation_config={"mode": 0} if args.eager or not sizes else graphs,
        disable_log_stats=True,
        **options,
    )


def core_of(llm: Any) -> Any:
    """The engine core, which lives in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
    return llm.llm_engine.engine_core.engine_core


def host_settings(llm: Any) -> dict[str, str]:
    """What the host has decided by itself and a comparison of step times depends on."""
    config = llm.llm_engine.vllm_config
    return {
        "async_scheduling": str(config.scheduler_config.async_scheduling),
        "v2_model_runner": str(config.use_v2_model_runner),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "executor": type(core_of(llm).model_executor).__name__,
    }


def index_groups(llm: Any) -> list[Any]:
    """HiSparse's groups of layers with one resolution each."""
    forward = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = [getattr(layer, "hisparse_cache", None) for layer in forward.values()]
    return [cache.runtime.index_group for cache in caches if cache is not None and cache.runtime.is_group_leader]


def swap_counts(llm: Any) -> tuple[int, int]:
    counts = [group.swap_stats.tolist() for group in index_groups(llm)]
    return sum(hits for hits, _ in counts), sum(misses for _, misses in counts)


def prompt(request: int, context: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(1000 * context + request)
    return torch.randint(10, CONFIG["vocab_size"], (context,), generator=generator).tolist()


def settle(llm: Any, pool: Any) -> None:
    """Run small requests until the blocks of aborted ones are back: copies in flight hold them for some steps."""
    from vllm import SamplingParams

    engine, before = llm.llm_engine, -1
    for number in range(16):
        if pool.get_num_free_blocks() == before:
            return
        before = pool.get_num_free_blocks()
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        engine.add_request(f"settle-{number}", {"prompt_token_ids": [10]}, params)
        while engine.has_unfinished_requests():
            engine.step()


@contextlib.contextmanager
def room_for(llm: Any, requests: int, context: int, args: argparse.Namespace) -> Iterator[None]:
    """Under HiSparse, hold back the device blocks that the case would fill with context of its own."""
    if "hisparse" not in args.variant or args.gpu_kv_gib:
        yield
        return
    pool = core_of(llm).scheduler.kv_cache_manager.coordinator.block_pool
    window = args.warmup + args.steps + (40 if args.profile else 0)
    settle(llm, pool)
    spare = pool.get_num_free_blocks() - device_kv_bytes([Case(requests, context)], window, args.layers) // PAGE_BYTES
    held = pool.get_new_blocks(max(0, spare))
    log(f"{requests}x{context}: {pool.get_num_free_blocks()} of {pool.num_gpu_blocks} device blocks left")
    try:
        yield
    finally:
        pool.free_blocks(held)


@contextlib.contextmanager
def sorted_lists_without_graphs(llm: Any) -> Iterator[None]:
    """Attention sums in the order of positions, whatever order the host's top-k found them in."""
    from vllm.models.deepseek_v32 import attention

    original, topk = attention.sparse_attn_indexer, CONFIG["index_topk"]

    def indexer(hidden_states: Any, *rest: Any, **options: Any) -> Any:
        buffer = original(hidden_states, *rest, **options)
        rows = buffer[: hidden_states.shape[0], :topk]
        rows.copy_(rows.sort(-1, descending=True).values)  # -1 stays behind
        return buffer

    manager = core_of(llm).model_executor.driver_worker.worker.model_runner.cudagraph_manager
    captured = getattr(manager, "_graphs_captured", False)
    attention.sparse_attn_indexer = indexer
    if manager is not None:
        manager._graphs_captured = False
    try:
        yield
    finally:
        attention.sparse_attn_indexer = original
        if manager is not None:
            manager._graphs_captured = captured


def run_equality(llm: Any, steps: Steps, requests: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Two runs of one case; the second keeps what the first one found, and how far both agree."""
    plain = argparse.Namespace(**{**vars(args), "profile": False})
    with room_for(llm, requests, context, plain), sorted_lists_without_graphs(llm):
        first, second = (run_case(llm, steps, requests, context, plain, last=False, salt=salt) for salt in ("a", "b"))
    second["first_difference_to_itself"] = differences(first["tokens"], second["tokens"])
    second["same_schedule_as_itself"] = first["schedule"] == second["schedule"]
    return second


def run_repeatedly(llm: Any, steps: Steps, case: Case, args: argparse.Namespace, last: bool) -> dict[str, Any]:
    """A case's first run, with the step times of all its runs; the last one is profiled."""
    results = [
        run_case(llm, steps, case.requests, case.context, args, last and run == case.runs - 1, salt=f"r{run}")
        for run in range(case.runs)
    ]
    kept, medians = results[0], [result["decode_ms"] for result in results]
    kept["decode_ms_runs"] = medians
    if None not in medians:
        kept["decode_ms"] = statistics.median(medians)
        kept["decode_ms_p90"] = statistics.median(result["decode_ms_p90"] for result in results)
    if "profile" in results[-1]:
        kept["profile"] = results[-1]["profile"]
    return kept


def run_case(
    llm: Any, steps: Steps, requests: int, context: int, args: argparse.Namespace, last: bool, salt: str = ""
) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    profiler = Profiler(args.warmup + args.steps) if args.profile and last else None
    window = args.warmup + args.steps + (profiler.steps if profiler else 0)
    params = SamplingParams(
        max_tokens=decode_tokens(requests, context, window),
        ignore_eos=True,
        detokenize=False,
        temperature=0.0,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    torch.cuda.reset_peak_memory_stats()
    steps.begin(requests)
    steps.on_full = profiler.at if profiler else lambda count: None
    before = swap_counts(llm)
    tokens: dict[str, list[int]] = {}
    start = time.perf_counter()
    names = [f"{requests}x{context}{salt}-{number}" for number in range(requests)]
    for number, name in enumerate(names):
        # The salt keeps a second run from finding the first one's prefixes.
        engine.add_request(name, {"prompt_token_ids": prompt(number, context), "cache_salt": name}, params)
    decoding = None
    while engine.has_unfinished_requests() and len(steps.full) <= window:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        if decoding is None and len(steps.full) == 1:
            decoding = time.perf_counter()
    torch.cuda.synchronize()
    after = swap_counts(llm)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    times = steps.milliseconds()[args.warmup : args.warmup + args.steps]
    kept = [tokens.get(name, [])[: args.steps] for name in names]
    result: dict[str, Any] = {
        "requests": requests,
        "context": context,
        "prefill_s": round((decoding or time.perf_counter()) - start, 3),
        "decode_ms": round(statistics.median(times), 3) if times else None,
        "decode_ms_p90": round(sorted(times)[int(0.9 * (len(times) - 1))], 3) if times else None,
        "running": steps.most_running,
        "hits": after[0] - before[0],
        "misses": after[1] - before[1],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "digest": hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16],
        "schedule": steps.batches.hexdigest()[:16],
        "tokens": kept[:8],
    }
    if profiler:
        result["profile"] = profiler.report()
    return result


def capacity(llm: Any, hisparse: bool) -> dict[str, Any]:
    """How many requests of the longest context fit, by the host's own arithmetic."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    vllm_config, kv = llm.llm_engine.vllm_config, core_of(llm).scheduler.kv_cache_config
    answer: dict[str, Any] = {
        "context": vllm_config.model_config.max_model_len,
        "blocks": kv.num_blocks,
        "gpu_kv_gib": round(max(tensor.size for tensor in kv.kv_cache_tensors) / 2**30, 3),
        "concurrency": round(get_max_concurrency_for_kv_cache_config(vllm_config, kv), 2),
    }
    if hisparse:
        from vllm.v1.hisparse.layout import get_hisparse_steady_state_concurrency

        answer["host_blocks"] = kv.hisparse_host_num_blocks
        answer["steady_concurrency"] = round(get_hisparse_steady_state_concurrency(vllm_config, kv), 2)
        device = [tensor.size for tensor in kv.kv_cache_tensors if not tensor.host_resident]
        answer["gpu_kv_gib"] = round(max(device) / 2**30, 3)
    return answer


def differences(mine: list[list[int]], theirs: list[list[int]]) -> list[int | None]:
    """Where each request's tokens first differ, a shorter list at its end; None: nowhere."""
    return [
        next((at for at, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b), None)
        for one, other in zip(mine, theirs, strict=True)
    ]


def compare(case: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Add to a case where its tokens leave those of the same case of another run."""
    for twin in others:
        if (twin["requests"], twin["context"]) == (case["requests"], case["context"]):
            case["first_difference"] = differences(case["tokens"], twin["tokens"])
            case["same_schedule"] = case["schedule"] == twin.get("schedule")


def save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result))


def keep(
    kind: str, case: dict[str, Any], cases: list[dict[str, Any]], others: list[dict[str, Any]], hisparse: bool
) -> None:
    compare(case, others)
    if hisparse and not case["hits"]:
        log("NOTHING SWAPPED: every page stayed on the device")
    log(f"{kind} " + json.dumps({key: value for key, value in case.items() if key not in ("tokens", "profile")}))
    cases.append(case)


def main() -> None:
    args = parse()
    os.environ.update(VARIANTS[args.variant])
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "CUDA_HOME": "/usr/local/cuda",
    }.items():
        os.environ.setdefault(name, value)
    begin = time.perf_counter()
    result: dict[str, Any] = {"variant": args.variant, "settings": {**VARIANTS[args.variant], "drift": args.drift}}
    result["settings"] |= {"eager": args.eager, "layers": args.layers}
    llm = make_engine(args, write_config(Path(tempfile.mkdtemp()) / "model", args.layers))
    result["start_s"] = round(time.perf_counter() - begin, 1)
    hisparse = "hisparse" in args.variant
    result["host"] = host_settings(llm)
    result["tied_layers"] = llm.apply_model(lambda model: slow_drift(model, args.drift))[0]
    result["capacity"] = capacity(llm, hisparse)
    log(json.dumps(result))
    steps = Steps(core_of(llm))
    other = json.loads(args.compare.read_text()) if args.compare and args.compare.exists() else {}
    result["cases"], result["equality"] = [], []
    todo = cases_of(args.cases)
    for case in todo[:1]:
        with room_for(llm, case.requests, case.context, args):
            run_case(llm, steps, case.requests, case.context, args, last=False, salt="warm-up")
    for number, case in enumerate(todo):
        if time.perf_counter() - begin > args.budget_s:
            log(f"no time for {case.requests}x{case.context}")
            break
        with room_for(llm, case.requests, case.context, args):
            found = run_repeatedly(llm, steps, case, args, last=number == len(todo) - 1)
        keep("CASE", found, result["cases"], other.get("cases", []), hisparse)
        save(result, args.out)
    for requests, context, _ in cases_of(args.equality):
        if time.perf_counter() - begin <= args.budget_s:
            found = run_equality(llm, steps, requests, context, args)
            keep("EQUALITY", found, result["equality"], other.get("equality", []), hisparse)
    save(result, args.out)
    for found in result["cases"] + result["equality"]:
        found.pop("tokens")
        found.pop("profile", None)
    print(json.dumps(result), flush=True)
    os._exit(0)  # unpinning and engine shutdown take longer than a case


if __name__ == "__main__":
    main()
