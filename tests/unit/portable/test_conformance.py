"""The conformance kit against the portable tier in Triton's interpreter: the hostile cases of every op in small shapes.

The whole matrix takes the interpreter some 20 minutes; on a GPU `tests/device/test_portable_conformance.py` runs it.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from baige_device.backends.portable import offers
from baige_device.testing import BackendConformance, all_cases

_CASES = {
    "quantize_blocks": """
        fp8_e4m3-bfloat16 fp8_e4m3-zero-block fp8_e4m3-ties fp8_e4m3-129x257 fp8_e4m3-1x1 fp8_e4m3-5x0
        fp8_e4m3-block-7-5 fp8_e4m3-offset-1 fp8_e4m3-transposed int8_absmax-bfloat16 int8_absmax-ties
        int8_absmax-127x1 bf16-float32 fp8_e4m3-nan-named bad-inputs
    """,
    "dequantize_blocks": """
        fp8_e4m3-bfloat16 fp8_e4m3-129x257 fp8_e4m3-1x1 fp8_e4m3-block-7-5 fp8_e4m3-offset-1
        fp8_e4m3-out-row-gap int8_absmax-bfloat16 int8_absmax-block-7-5 bf16-bfloat16 fp8_e4m3-all-codes
    """,
    "attend_paged": """
        mixed-bfloat16 mla-small decode-float16 heads-9-kv-3 head-size-80-80 length-0 length-17 page-1
        padded-requests window-8 soft-cap cache-page-gap bidirectional mla-decode-float32 mla-scale-deepseek
        no-tokens no-requests-padded
    """,
    "sparse_attention": """
        mla-half mla-all-minus mla-extra-half mla-page-gap mla-small mla-topk-0 mla-topk-65 mla-float32
        gqa-half gqa-extra-half gqa-ragged-heads gqa-v-narrower gqa-interleaved-cache fp8-half fp8-one-key
        fp8-extra-half fp8-all-minus fp8-page-gap fp8-float16 fp8-int64-index two-sets-equal-merge
        mla-tokens-0 fp8-tokens-0
    """,
    "merge_attention": """
        bfloat16 a-empty-bfloat16 both-empty-float32 far-apart-bfloat16 tokens-129 width-80 into-part-a
        strided-parts
    """,
    "index_topk": """
        mixed-bfloat16 decode-float8_e4m3fn decode-int8 topk-65 length-0 length-65 page-1 heads-4-size-32
        weights-negative equal-scores cache-page-gap padded-requests no-requests-padded no-tokens
    """,
    "kv_write": """
        dtype-bfloat16 convert-bfloat16-float8_e4m3fn saturates-bfloat16 saturates-float16 saturates-float32
        convert-float32-bfloat16 row-1x656 row-5x7 minus-half
        cache-page-gap values-head-gap spare-slots cache-offset-1
    """,
    "moe_dispatch": """
        flat-half-minus flat-tokens-0 expert_major-half-minus expert_major-alignment-8 masked-half-minus
        flat-scaled-fp8 masked-hidden-7 flat-all-minus flat-one-expert
    """,
    "moe_expert_ffn": """
        flat-bfloat16 flat-no-tokens expert_major-alignment-8 masked-bfloat16 flat-odd-sizes flat-all-minus
    """,
    "moe_combine": """
        flat-half-minus flat-all-minus expert_major-half-minus masked-half-minus masked-hidden-7
        flat-tokens-0
    """,
}


class TestInterpreted(BackendConformance):
    backend = "interpreted"
    plugin = "tests.unit.portable.plugin:PLUGIN"
    ops = tuple(_CASES)
    seed = 20261129  # CI must say the same twice

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per chosen case; the cases on several ranks take too long here."""
        if "conformance_case" in metafunc.fixturenames:
            chosen = [case for case in all_cases(self.ops) if case.name in _names()]
            metafunc.parametrize("conformance_case", chosen, ids=[case.name for case in chosen])
        if "conformance_ranks" in metafunc.fixturenames:
            metafunc.parametrize("conformance_ranks", [])


def _names() -> set[str]:
    return {f"{op}/{name}" for op, names in _CASES.items() for name in names.split()}


def test_every_portable_op_has_cases_and_every_case_exists() -> None:
    assert set(_CASES) == set(offers.__all__)
    assert _names() <= {case.name for case in all_cases(tuple(_CASES))}
