"""How many requests of DeepSeek-V3.2 fit one GPU, with HiSparse and without: the plan, and its device part allocated.

    python benchmarks/hisparse_capacity.py OUT.json

KV of all 61 layers (656-byte rows, 132-byte index keys) is allocated layer by layer beside a ballast for what the
budget leaves to weights and workspace. Host memory is not allocated.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from baige_device import __version__
from baige_device.optimizations.hisparse import HiSparseFacts, plan_hisparse

LAYERS, ROW_BYTES, INDEX_ROW_BYTES, TOPK = 61, 656, 132, 2048
CONTEXTS = {"60K": 60_000, "200K": 200_000}
GIB = 1 << 30
RESERVES = {"the whole card but 4 GiB": 4 * GIB, "beside 84 GiB of weights and 10 GiB of workspace": 94 * GIB}
SLACK_BYTES = GIB
"""Left out of the ballast, because the allocator rounds every tensor up."""


def fits(batch: int, context: int, hot: int) -> bool:
    """Whether rows of the hot (or all) tokens and index keys of all tokens can be had for so many requests."""
    sizes = (batch * min(hot, context) * ROW_BYTES, batch * context * INDEX_ROW_BYTES)
    held: list[torch.Tensor] = []
    try:
        for _ in range(LAYERS):
            held += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        held.clear()
        torch.cuda.empty_cache()
    return True


def case(budget: str, context: str, free_bytes: int) -> dict[str, Any]:
    """The plan for one budget and context, and what of it could be allocated."""
    tokens, reserve = CONTEXTS[context], RESERVES[budget]
    kv_bytes = free_bytes - reserve
    plan = plan_hisparse(
        HiSparseFacts(LAYERS, ROW_BYTES, INDEX_ROW_BYTES, TOPK, tokens, kv_bytes, host_gib_per_node=1e6, local_ranks=1)
    )
    ballast = torch.empty(reserve - SLACK_BYTES, dtype=torch.uint8, device="cuda")
    allocated = {
        "with": fits(plan.batch_with, tokens, plan.hot_tokens),
        "without": fits(plan.batch_without, tokens, tokens),
        "without, at the batch with": fits(plan.batch_with, tokens, tokens),
    }
    del ballast
    torch.cuda.empty_cache()
    return {
        "context": context,
        "budget": budget,
        "kv_gib": round(kv_bytes / GIB, 1),
        "batch_without": plan.batch_without,
        "batch_with": plan.batch_with,
        "ratio": round(plan.batch_with / max(1, plan.batch_without), 2),
        "host_gib": round(plan.batch_with * tokens * LAYERS * ROW_BYTES / GIB),
        "device_kv_allocated": allocated,
    }


def main(out: Path) -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    cases = [case(budget, context, free_bytes) for context in CONTEXTS for budget in RESERVES]
    versions = {"baige-device": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    report = {
        "card": torch.cuda.get_device_name(),
        "versions": versions,
        "date": date.today().isoformat(),
        "what": "largest batch of DeepSeek-V3.2 (61 layers, 656-byte rows, 132-byte index keys, top-k 2048) by "
        "plan_hisparse at 60,000 and 200,000 tokens, with and without HiSparse; the device's part of each was then "
        "allocated layer by layer. Host memory was not allocated.",
        "cases": cases,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
