"""How far a result may be from its float64 reference: one table, each entry with its reason.

Errors are |got - want| / (1 + |want|) on data of unit scale, so a limit is relative for large values and absolute for
small ones. Ops that move or convert data without arithmetic have no tolerance: they are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TABLE", "Tolerance", "limit", "rounding"]


@dataclass(frozen=True)
class Tolerance:
    """A limit and why it is that large."""

    limit: float
    reason: str


_TF32 = "fp32 products accumulated in fp32 over thousands of terms; TF32 products (2^-11) do not pass"
TABLE: dict[str, dict[torch.dtype, Tolerance]] = {
    "attention_out": {
        torch.float32: Tolerance(5e-5, _TF32),
        torch.float16: Tolerance(4e-3, "probabilities and output rounded to fp16 (2^-11 each)"),
        torch.bfloat16: Tolerance(1.6e-2, "probabilities and output rounded to bf16 (2^-9 each)"),
    },
    "attention_lse": {
        torch.float32: Tolerance(5e-5, _TF32),
        torch.float16: Tolerance(1e-3, "exact fp16 products accumulated in fp32, fast exp and log"),
        torch.bfloat16: Tolerance(1e-3, "exact bf16 products accumulated in fp32, fast exp and log"),
    },
    "fp8_attention_out": {
        torch.float32: Tolerance(1.6e-2, "keys decoded to bf16 (2^-9) before the products"),
        torch.float16: Tolerance(1.6e-2, "keys decoded to bf16 (2^-9) before the products"),
        torch.bfloat16: Tolerance(1.6e-2, "keys decoded to bf16 (2^-9), probabilities and output rounded to bf16"),
    },
    "fp8_attention_lse": {
        torch.float32: Tolerance(1e-2, "keys decoded to bf16 (2^-9) before the products"),
        torch.float16: Tolerance(1e-2, "keys decoded to bf16 (2^-9) before the products"),
        torch.bfloat16: Tolerance(1e-2, "keys decoded to bf16 (2^-9) before the products"),
    },
    "merge_out": {
        torch.float32: Tolerance(1e-5, "two fast exponentials and one division in fp32"),
        torch.float16: Tolerance(1e-3, "the same, rounded once to fp16"),
        torch.bfloat16: Tolerance(6e-3, "the same, rounded once to bf16"),
    },
    "index_score": {
        torch.float32: Tolerance(2.0**-17, "share of sum |w||q||k|: fp32 accumulation"),
        torch.float16: Tolerance(2.0**-14, "share of sum |w||q||k|: exact products, fp32 accumulation in any order"),
        torch.bfloat16: Tolerance(2.0**-14, "share of sum |w||q||k|: exact products, fp32 accumulation in any order"),
        torch.int8: Tolerance(2.0**-17, "share of sum |w||q||k|: exact int32 products, fp32 sum over heads"),
        torch.float8_e4m3fn: Tolerance(2.0**-11, "share of sum |w||q||k|: fp8 matrix units accumulate with ~14 bits"),
    },
    "ffn": {
        torch.float32: Tolerance(1e-4, "two fp32 products, fast sigmoid or tanh"),
        torch.float16: Tolerance(8e-3, "gate, up and activation rounded to fp16 between two products"),
        torch.bfloat16: Tolerance(4e-2, "gate, up and activation rounded to bf16 between two products"),
    },
    "combine": {
        torch.float32: Tolerance(1e-5, "fp32 sum of at most k terms"),
        torch.float16: Tolerance(1e-3, "fp32 sum, rounded once"),
        torch.bfloat16: Tolerance(6e-3, "fp32 sum, rounded once"),
    },
    "combine_ranks": {
        torch.float32: Tolerance(1e-5, "fp32 sum of at most k terms"),
        torch.float16: Tolerance(2e-3, "partial sums travel in fp16"),
        torch.bfloat16: Tolerance(1.6e-2, "partial sums travel in bf16"),
    },
}

_MANTISSA_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def limit(kind: str, dtype: torch.dtype) -> float:
    """The limit of one row of the table."""
    return TABLE[kind][dtype].limit


def rounding(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest, with 1 % for a double rounding through fp32."""
    return 1.01 * 2.0 ** -_MANTISSA_BITS[dtype]
