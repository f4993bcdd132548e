"""Sparse MLA attention, fp8 decode and bf16 prefill: the portable Triton kernel beside FlashMLA.

`BENCH_FLASH_MLA` names the folder in which the wheel `sgl-flash-mla` is unpacked, if it is not installed; without it
the FlashMLA peer and the tuned tier are left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baige_device.backends.portable.sparse_attention import sparse_attention as portable
from baige_device.cli.bench_case import BenchCase, Peer
from baige_device.ops.sparse_attention.reference import sparse_attention as reference

OPS = ("sparse_attention",)

_SCALE = 576**-0.5
_TOPK = 2048
_SETS = 4
_CHECKED = 4
_Op = Callable[..., tuple[Tensor, Tensor]]


def cases() -> Iterator[BenchCase]:
    """fp8 decode at 128 requests and few, 16 to 128 heads; bf16 prefill of 4096 queries."""
    if "BENCH_FLASH_MLA" in os.environ:
        sys.path.insert(0, os.environ["BENCH_FLASH_MLA"])
    torch.manual_seed(0)
    pool = fp8_rows(128 * 4096)
    for tokens, heads in ((1, 128), (16, 128), (64, 128), (128, 128), (128, 64), (128, 32), (128, 16)):
        yield from _both_tiers(f"fp8 decode batch {tokens} heads {heads}", pool, tokens, heads, "fp8_ds_mla")
    rows = torch.randn(32768, 1, 576, device="cuda").bfloat16()
    for tokens, heads in ((4096, 128), (4096, 64)):
        yield from _both_tiers(f"bf16 prefill T {tokens} heads {heads}", rows, tokens, heads, "plain")


def fp8_rows(rows: int) -> Tensor:
    """Random rows of the 656-byte format, `[rows, 1, 656]`."""
    pool = torch.empty(rows, 1, 656, dtype=torch.uint8, device="cuda")
    pool[..., :512] = torch.randn(rows, 1, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    pool[..., 512:528] = (0.1 + torch.rand(rows, 1, 4, device="cuda")).view(torch.uint8)
    pool[..., 528:] = torch.randn(rows, 1, 64, device="cuda").bfloat16().view(torch.uint8)
    return pool


def _both_tiers(name: str, pool: Tensor, tokens: int, heads: int, kv_format: str) -> Iterator[BenchCase]:
    q = (0.3 * torch.randn(tokens, heads, 576, device="cuda")).bfloat16()
    lists = [
        torch.randint(0, pool.shape[0], (tokens, 1, _TOPK), device="cuda", dtype=torch.int32) for _ in range(_SETS)
    ]
    found = importlib.util.find_spec("flash_mla") is not None
    peers = (_flash_mla(q, pool, lists, kv_format),) if found else ()
    tiers: list[tuple[str, _Op]] = [("portable", portable)]
    if found and heads in (64, 128):
        from baige_device.backends.cuda.flash_mla import sparse_attention as tuned

        tiers.append(("tuned", tuned))
    for tier, op in tiers:
        yield BenchCase(
            "sparse_attention",
            f"{name} {tier}",
            _runner(op, q, pool, lists, kv_format),
            _checker(_runner(op, q, pool, lists, kv_format), q, pool, lists[0], kv_format),
            2 * tokens * heads * _TOPK * (576 + 512),
            "matmul",
            sets=_SETS,
            tier=tier,
            peers=peers,
            facts={"batch": tokens, "heads": heads, "topk": _TOPK},
        )


def _runner(op: _Op, q: Tensor, pool: Tensor, lists: list[Tensor], kv_format: str) -> Callable[[int], object]:
    return lambda i: op(q, pool, None, lists[i], scale=_SCALE, v_dim=512, kv_format=kv_format)


def _checker(run: Callable[[int], object], q: Tensor, pool: Tensor, ids: Tensor, kv_format: str) -> Callable[[], None]:
    def verify() -> None:
        got = run(0)
        assert isinstance(got, tuple)
        some = slice(0, _CHECKED)
        want = reference(q[some], pool, None, ids[some], scale=_SCALE, v_dim=512, kv_format=kv_format)
        for value, right in zip(got, want, strict=True):
            error = ((value[some].double() - right.double()).abs() / (1 + right.double().abs())).max().item()
            assert error < 1e-2, f"error {error:.1e}, limit 1e-2"

    return verify


def _flash_mla(q: Tensor, pool: Tensor, lists: list[Tensor], kv_format: str) -> Peer:
    """FlashMLA on the same work; fewer than 64 heads are padded to 64, as it demands."""
    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

    tokens, heads, _ = q.shape
    padded = q.new_zeros(tokens, max(64, heads), 576)
    padded[:, :heads] = q
    schedule = get_mla_metadata()[0]

    def run(i: int) -> tuple[Tensor, Tensor]:
        if kv_format == "plain":
            out, _, lse = flash_mla_sparse_fwd(padded, pool, lists[i], _SCALE, use_legacy=True)
            return out[:, :heads], lse[:, :heads]
        pages = pool.view(-1, 64, 1, 656)
        out, lse = flash_mla_with_kvcache(
            padded.unsqueeze(1), pages, None, None, 512, schedule, None, _SCALE, False, True, lists[i], use_legacy=True
        )
        return out[:, 0, :heads], lse[:, :heads, 0]

    return Peer("FlashMLA", run, _checker(run, q, pool, lists[0], kv_format))
