"""Cases of `uva_sparse_gather` and `uva_sparse_scatter` without requests: plans `[0, M]`, as an idle step has them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from baige_device.testing.cases import Call, Case, trial
from baige_device.testing.checks import check_storage, expect
from baige_device.testing.lab import Lab
from baige_device.testing.needs import dtype_name
from baige_device.testing.pools import LAYOUTS, pool

__all__ = ["cases"]

GATHER, SCATTER = "uva_sparse_gather", "uva_sparse_scatter"
WIDTH, ENTRIES = 132, 33


def cases() -> list[Case]:
    found: list[Case] = []
    for op in (GATHER, SCATTER):
        for dtype in (torch.int32, torch.int64):
            params = {
                "row_bytes": WIDTH,
                "dtype": "uint8",
                "index_dtype": dtype_name(dtype),
                "pool": "paged",
                "by_request": True,
            }
            name = f"zero-requests-{dtype_name(dtype)}"
            found += trial(op, name, partial(_build, op, dtype), _verify, params, mutates=())
    return found


def _build(op: str, dtype: torch.dtype, lab: Lab) -> dict[str, Any]:
    layout = LAYOUTS["paged"]
    args: dict[str, Any] = {
        "src": pool(lab, 20, WIDTH, torch.uint8, layout, host=op == GATHER),
        "dst": pool(lab, 20, WIDTH, torch.uint8, layout, host=op == SCATTER),
        "src_rows": torch.empty(0, ENTRIES, dtype=dtype, device=lab.device),
        "dst_rows": torch.empty(0, ENTRIES, dtype=dtype, device=lab.device),
        "count": torch.empty(0, dtype=torch.int32, device=lab.device),
    }
    if op == GATHER:
        args["dst_offsets"] = torch.empty(0, dtype=dtype, device=lab.device)
    return args


def _verify(call: Call) -> float:
    check_storage("dst", call.args["dst"], call.before["dst"])
    expect(call.result is None, f"result: expected None, got {type(call.result).__name__}")
    return 0.0
