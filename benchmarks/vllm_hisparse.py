"""Decode steps in real vLLM 0.33 on an NVIDIA GPU: its own kernels and HiSparse against ours, in DeepSeek-V3.2's shape.

    python benchmarks/vllm_hisparse.py VARIANT --cases 8x20000,64x20000 [--steps 32] [--eager] [--gpu-kv-gib 4]
        [--drift 0.75] [--equality 4x12000] [--profile] [--out RESULT.json]

One engine start (about half a minute) runs all cases, REQUESTSxCONTEXT each, of distinct random prompts. A decode step
is the time between two schedules that hold one token of every request. Progress goes to stderr; the last line of stdout
is one JSON object:

    {"variant", "settings", "capacity": {"context", "concurrency", "steady_concurrency", "gpu_kv_gib", "blocks"},
     "cases": [{"requests", "context", "prefill_s", "decode_ms", "decode_ms_p90", "running", "hits", "misses",
                "peak_gib", "tokens", "digest", "schedule", "profile": {...}}],
     "equality": [{... of two runs}]}

`tokens` are the first ones of each request. `--compare RESULT.json` adds where each request first differs from that
run (`first_difference`, null for nowhere), and whether the scheduler made the same batches (`same_schedule`).

Tokens of two runs of one variant differ, too: the host's top-k lists its positions in the order in which threads come,
sums follow that order, and random weights leave the two best tokens close. `--equality` runs a case twice without
graphs and with every list sorted. What then differs is not the order: `first_difference_to_itself` is the variant's own
noise, and against another run of the same schedule any difference is one of numbers or of rows.

Variants: `native` and `ours` keep all KV on the device; `native-hisparse`, `ours-hisparse` and `ours-hisparse-overlap`
keep it in pinned host memory. `ours-portable`, `ours-off`, `ours-index`, `ours-hisparse-attention-off`,
`ours-hisparse-mirror-off` and `ours-hisparse-swap-off` switch one op. Under HiSparse pages stay on the device while it
has room, and nothing is swapped; so unless `--gpu-kv-gib` says otherwise, the device gets what the largest case needs
with its context on the host.

Needs vLLM 0.33, a Hopper GPU, and baige-device installed (its entry points mount it).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from vllm_model import CONFIG, LAYERS, slow_drift, use_variance_keeping_weights, write_config

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
    "ours-hisparse-swap-off": {**_ON, "BAIGE_OPS": "hot_cache_resolve=off,uva_sparse_gather=off"},
}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Steps:
    """Watches the scheduler: when it was called, and for which batch."""

    def __init__(self, core: Any) -> None:
        self.requests = 0
        self.batches = hashlib.sha256()
        self.full: list[float] = []
        self.most_running = 0
        self.on_full: Callable[[int], None] = lambda count: None
        schedule = core.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            output = schedule(*args, **kwargs)
            tokens = output.num_scheduled_tokens
            self.most_running = max(self.most_running, len(tokens))
            self.batches.update(json.dumps(list(tokens.values())).encode())
            if self.requests and len(tokens) == self.requests == output.total_num_scheduled_tokens:
                self.full.append(now)
                self.on_full(len(self.full))
            elif output.total_num_scheduled_tokens:
                self.full.clear()  # a window of full batches is unbroken
            return output

        core.scheduler.schedule = watched

    def begin(self, requests: int) -> None:
        self.requests, self.most_running = requests, 0
        self.batches = hashlib.sha256()
        self.full.clear()

    def milliseconds(self) -> list[float]:
        return [1000 * (after - before) for before, after in zip(self.full, self.full[1:], strict=False)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=sorted(VARIANTS))
    parser.add_argument("--cases", default="8x20000", help="REQUESTSxCONTEXT, comma separated; empty: capacity only")
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


def cases_of(text: str) -> list[tuple[int, int]]:
    return [
        (int(requests), int(context)) for requests, context in (case.split("x") for case in text.split(",") if case)
    ]


def decode_tokens(requests: int, context: int, window: int) -> int:
    """Tokens that the first request generates until the last one is through its prompt, and the window behind."""
    return -(-requests * context // BUDGET_TOKENS) * 2 + window + 16


def device_kv_bytes(cases: list[tuple[int, int]], window: int) -> int:
    """What HiSparse needs on the device for the largest case when no context stays there.

    Pages of index keys and of hot buffers, the tails being written, and the pages of two batches of prompts in flight.
    A page of any kind takes one block of the pool.
    """
    most = 0
    for requests, context in cases:
        index = -(-(context + decode_tokens(requests, context, window)) // PAGE)
        hot = LAYERS * (HOT_TOKENS // PAGE + 4)
        most = max(most, requests * (index + hot))
    in_flight = LAYERS * 2 * BUDGET_TOKENS // PAGE
    return int((most + 1.25 * in_flight) * PAGE_BYTES * 1.08)


def make_engine(args: argparse.Namespace, folder: Path) -> Any:
    cases = cases_of(args.cases) + cases_of(args.equality)
    window = args.warmup + args.steps + (40 if args.profile else 0)
    length = max([c + decode_tokens(r, c, window) for r, c in cases], default=0)
    length = max(length, args.capacity_context + 1)
    requests = max((r for r, _ in cases), default=1)
    use_variance_keeping_weights()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    hisparse = "hisparse" in args.variant
    options: dict[str, Any] = {"attention_config": {"backend": "FLASHMLA_SPARSE"}}
    gpu_bytes = int(args.gpu_kv_gib * 2**30)
    if hisparse:
        host = max((r * (c + decode_tokens(r, c, window) + PAGE) for r, c in cases), default=0)
        host_gib = args.host_kv_gib or max(1.0, max(host, 2 * length) * LAYERS * ROW_BYTES * 1.1 / 2**30)
        gpu_bytes = gpu_bytes or device_kv_bytes(cases, window)
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
    sizes = sorted({r for r, _ in cases_of(args.cases)})
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


@contextlib.contextmanager
def room_for(llm: Any, requests: int, context: int, args: argparse.Namespace) -> Iterator[None]:
    """Under HiSparse, hold back the device blocks that the case would fill with context of its own."""
    if "hisparse" not in args.variant or args.gpu_kv_gib:
        yield
        return
    pool = core_of(llm).scheduler.kv_cache_manager.coordinator.block_pool
    window = args.warmup + args.steps + (40 if args.profile else 0)
    spare = pool.get_num_free_blocks() - device_kv_bytes([(requests, context)], window) // PAGE_BYTES
    held = pool.get_new_blocks(max(0, spare))
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


class Profiler:
    """Some steps under torch's profiler, then some under cProfile."""

    DEVICE_STEPS, HOST_STEPS = 4, 24

    def __init__(self, begin: int) -> None:
        self.steps = self.DEVICE_STEPS + self.HOST_STEPS + 4
        self.begin = begin
        self.device: Any = None
        self.host: Any = None

    def at(self, count: int) -> None:
        import cProfile

        import torch
        from torch.profiler import ProfilerActivity, profile

        step = count - self.begin
        if step == 1:
            torch.cuda.synchronize()
            self.device = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.device.__enter__()
        elif step == 1 + self.DEVICE_STEPS:
            torch.cuda.synchronize()
            self.device.__exit__(None, None, None)
        elif step == 2 + self.DEVICE_STEPS:
            self.host = cProfile.Profile()
            self.host.enable()
        elif step == 2 + self.DEVICE_STEPS + self.HOST_STEPS:
            self.host.disable()

    def report(self) -> dict[str, Any]:
        import pstats

        from torch.autograd import DeviceType

        if self.device is None or self.host is None:
            return {}
        events = [event for event in self.device.key_averages() if event.device_type == DeviceType.CUDA]
        events.sort(key=lambda event: -event.self_device_time_total)
        kernels = [
            {
                "kernel": event.key[:90],
                "us_a_step": round(event.self_device_time_total / self.DEVICE_STEPS, 1),
                "launches_a_step": round(event.count / self.DEVICE_STEPS, 1),
            }
            for event in events[:28]
        ]
        stats = pstats.Stats(self.host).stats  # type: ignore[attr-defined]
        rows = sorted(stats.items(), key=lambda item: -item[1][3])
        functions = [
            {
                "function": f"{'/'.join(file.split('/')[-2:])}:{line} {name}",
                "ms_a_step": round(1000 * cumulative / self.HOST_STEPS, 3),
                "own_ms_a_step": round(1000 * own / self.HOST_STEPS, 3),
                "calls_a_step": round(calls / self.HOST_STEPS, 1),
            }
            for (file, line, name), (_, calls, own, cumulative, _) in rows[:90]
        ]
        return {
            "device_us_a_step": round(sum(event.self_device_time_total for event in events) / self.DEVICE_STEPS, 1),
            "kernels": kernels,
            "python": functions,
        }


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
    """Where each request's tokens first differ; None: nowhere."""
    return [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
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


def keep(kind: str, case: dict[str, Any], cases: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    compare(case, others)
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
    result["settings"]["eager"] = args.eager
    llm = make_engine(args, write_config(Path(tempfile.mkdtemp()) / "model"))
    result["start_s"] = round(time.perf_counter() - begin, 1)
    hisparse = "hisparse" in args.variant
    result["tied_layers"] = llm.apply_model(lambda model: slow_drift(model, args.drift))[0]
    result["capacity"] = capacity(llm, hisparse)
    log(json.dumps(result))
    steps = Steps(core_of(llm))
    other = json.loads(args.compare.read_text()) if args.compare and args.compare.exists() else {}
    result["cases"], result["equality"] = [], []
    todo = cases_of(args.cases)
    for number, (requests, context) in enumerate(todo):
        if time.perf_counter() - begin > args.budget_s:
            log(f"no time for {requests}x{context}")
            break
        with room_for(llm, requests, context, args):
            case = run_case(llm, steps, requests, context, args, last=number == len(todo) - 1)
        keep("CASE", case, result["cases"], other.get("cases", []))
        save(result, args.out)
    for requests, context in cases_of(args.equality):
        if time.perf_counter() - begin <= args.budget_s:
            case = run_equality(llm, steps, requests, context, args)
            keep("EQUALITY", case, result["equality"], other.get("equality", []))
    save(result, args.out)
    for case in result["cases"] + result["equality"]:
        case.pop("tokens")
        case.pop("profile", None)
    print(json.dumps(result), flush=True)
    os._exit(0)  # unpinning and engine shutdown take longer than a case


if __name__ == "__main__":
    main()
