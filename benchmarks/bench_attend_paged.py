"""Dense attention over a paged cache: the portable Triton kernel and FlashAttention 3.

`BENCH_FA3_LIB` is `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` of vLLM's wheel; without it, and without the package
`flash_attn_3`, the tuned tier is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baige_device.backends.portable.attend_paged import attend_paged as portable
from baige_device.cli.bench_case import BenchCase
from baige_device.ops.attend_paged.reference import attend_paged as reference

OPS = ("attend_paged",)

_CHECKED = 64
_LATENT, _VALUES = 576, 512
_Op = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """`lengths` holds (queries, tokens) of each request. One kv head of 576 is DeepSeek's latent cache."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    page_tokens: int = 16
    window: int = 0

    @property
    def latent(self) -> bool:
        return self.size == _LATENT


SHAPES = (
    Shape("decode, 1 x 4096", ((1, 4096),)),
    Shape("decode, 8 x 4096", ((1, 4096),) * 8),
    Shape("decode, 64 x 4096", ((1, 4096),) * 64),
    Shape("decode, 64 x 128 to 8192", tuple((1, 128 * (number + 1)) for number in range(64))),
    Shape("prefill of 4096", ((4096, 4096),)),
    Shape("chunks, 4 x 512 of 8192", ((512, 8192),) * 4),
    Shape("latent, 128 heads, decode, 16 x 4096", ((1, 4096),) * 16, 128, 1, _LATENT, 64),
    Shape("latent, 128 heads, decode, 128 x 4096", ((1, 4096),) * 128, 128, 1, _LATENT, 64),
    Shape("latent, 16 heads, decode, 64 x 4096", ((1, 4096),) * 64, 16, 1, _LATENT, 64),
    Shape("heads of 256, decode, 32 x 4096", ((1, 4096),) * 32, 16, 2, 256),
    Shape("window of 128, decode, 64 x 4096", ((1, 4096),) * 64, 64, 8, 64, 16, 128),
)


def cases() -> Iterator[BenchCase]:
    """Every shape in both tiers."""
    library = os.environ.get("BENCH_FA3_LIB")
    if library is not None:
        torch.ops.load_library(library)
    from baige_device.backends.cuda.flash_attention import attend_paged as tuned
    from baige_device.backends.cuda.flash_attention_library import find_flash_attention

    torch.manual_seed(0)
    for shape in SHAPES:
        batch = _batch(shape)
        tiers: list[tuple[str, _Op]] = [("portable", portable)]
        if find_flash_attention()[0] is not None:
            tiers.append(("tuned", tuned))
        for tier, op in tiers:
            yield _case(shape, batch, tier, op)
        torch.cuda.empty_cache()


def _batch(shape: Shape) -> dict[str, Any]:
    """Arguments of one call; pages are dealt out in random order."""
    pages_of = [-(-tokens // shape.page_tokens) for _, tokens in shape.lengths]
    order = torch.randperm(sum(pages_of), dtype=torch.int32, device="cuda").split(pages_of)
    queries = [count for count, _ in shape.lengths]
    starts = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    cache = (sum(pages_of), shape.page_tokens, shape.kv_heads, shape.size)
    return {
        "q": torch.randn(sum(queries), shape.heads, shape.size, device="cuda").bfloat16(),
        "k_cache": torch.randn(cache, device="cuda").bfloat16(),
        "v_cache": None if shape.latent else torch.randn(cache, device="cuda").bfloat16(),
        "block_table": torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True),
        "q_starts": starts,
        "seq_lens": torch.tensor([tokens for _, tokens in shape.lengths]).int().cuda(),
        "scale": shape.size**-0.5,
        "v_dim": _VALUES if shape.latent else 0,
        "window": shape.window,
        "max_query_tokens": max(queries),
        "max_seq_tokens": max(tokens for _, tokens in shape.lengths),
    }


def _case(shape: Shape, batch: dict[str, Any], tier: str, op: _Op) -> BenchCase:
    decode = max(queries for queries, _ in shape.lengths) == 1
    return BenchCase(
        "attend_paged",
        f"{shape.name} {tier}",
        lambda _: op(**batch),
        lambda: _verify(shape, batch, op),
        _bytes(shape) if decode else _operations(shape),
        "copy" if decode else "matmul",
        tier=tier,
        facts={"batch": len(shape.lengths), "heads": shape.heads, "series": f"{shape.name} {tier}"},
    )


def _bytes(shape: Shape) -> int:
    """Rows of the cache that a decode step reads."""
    rows = sum(min(tokens, shape.window or tokens) for _, tokens in shape.lengths)
    return rows * shape.kv_heads * shape.size * 2 * (1 if shape.latent else 2)


def _operations(shape: Shape) -> int:
    """Both products of every query with what it sees."""
    seen = sum(queries * tokens - queries * (queries - 1) // 2 for queries, tokens in shape.lengths)
    return 2 * shape.heads * seen * (shape.size + (_VALUES if shape.latent else shape.size))


def _verify(shape: Shape, batch: dict[str, Any], op: _Op) -> None:
    """The last queries of the first request, which see the most."""
    queries, _ = shape.lengths[0]
    some = slice(max(0, queries - _CHECKED), queries)
    first = {
        "q": batch["q"][some],
        "block_table": batch["block_table"][:1],
        "q_starts": torch.tensor([0, some.stop - some.start], dtype=torch.int32, device="cuda"),
        "seq_lens": batch["seq_lens"][:1],
        "max_query_tokens": some.stop - some.start,
    }
    want, got = reference(**(batch | first)), op(**batch)
    for value, right in zip(got, want, strict=True):
        error = ((value[some].double() - right.double()).abs() / (1 + right.double().abs())).max().item()
        assert error < 1e-2, f"{shape.name}: error {error:.1e}, limit 1e-2"
