"""The questions about the chip that public code leaves open, each a named probe with what it decides.

Questions with `gates` are asked when ops are offered: a wrong answer withholds the offer, so that a surprise on
hardware is a reason at start-up and not a wrong token. The others only inform; `doctor` asks them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from baige_device.registry.offers import DeviceInfo

__all__ = ["QUESTIONS", "Answer", "Question", "answer_all", "ask", "forget"]

_HERE = "baige_device.backends.kunlun"


@dataclass(frozen=True)
class Answer:
    """What a probe found. `ok` is the reading that the adapters rely on, or for measurements that one was made."""

    ok: bool
    detail: str
    proven: tuple[int, ...] = ()
    """transfer_row_granularity: row sizes in bytes that were moved exactly."""


@dataclass(frozen=True)
class Question:
    """One open question. `probe` is `module:function(device) -> Answer` in this package."""

    name: str
    question: str
    decides: str
    probe: str
    gates: tuple[str, ...] = ()


def _selftest(name: str, question: str, decides: str, *gates: str) -> Question:
    return Question(name, question, decides, f"selftests:{name}", gates)


def _measurement(name: str, question: str, decides: str) -> Question:
    return Question(name, question, decides, f"measurements:{name}")


QUESTIONS: dict[str, Question] = {
    item.name: item
    for item in (
        _selftest(
            "host_register",
            "Can a private anonymous mapping be registered (upstream maps /dev/shm)?",
            "whether host_alloc is offered",
            "host_alloc",
        ),
        _selftest(
            "host_pointer_copy",
            "Does batch_memcpy take registered host addresses, and sizes of 0?",
            "gather and scatter without a host sync; else the next question",
            "uva_sparse_gather",
            "uva_sparse_scatter",
        ),
        _selftest(
            "transfer_row_granularity",
            "Which item_size and alignment does transfer_kv_per_layer_mla take? Upstream moves whole pages.",
            "gather and scatter by single rows; else copies through pinned staging",
            "uva_sparse_gather",
            "uva_sparse_scatter",
        ),
        _selftest(
            "sparse_lists",
            "Does kv_lod bound row ids or list positions in the sparse kernels, and is -1 skipped anywhere in a list?",
            "sparse attention over a hot buffer with remapped rows, and dense MLA built on it",
            "sparse_attention",
            "attend_paged",
        ),
        _selftest(
            "window_counts_self",
            "Does swa_left count keys before the query only, and is softmax_lse natural and [tokens, heads]?",
            "attend_paged: sliding windows and LSE",
            "attend_paged",
        ),
        _selftest(
            "cache_write_skips",
            "Do the cache kernels skip slot -1, and does BLHD_LAYOUT mean [pages, tokens, heads, columns]?",
            "kv_write by vendor kernels; else by indexed writes",
            "kv_write",
        ),
        _selftest(
            "index_order",
            "Do the int8 indexer kernels rank keys as their formula says, for paged and for gathered keys?",
            "index_topk on int8 keys",
            "index_topk",
        ),
        _selftest(
            "moe_order",
            "Do moe_pre_small and moe_pre_sorted keep the order of tokens within an expert, with one expert more?",
            "moe_dispatch",
            "moe_dispatch",
        ),
        _measurement(
            "sparse_topk_alignment",
            "Which list widths do the sparse kernels take? Upstream passes 2048 only.",
            "limits.SPARSE_TOPK_ALIGN",
        ),
        _measurement(
            "sparse_decode_or_prefill",
            "From how many queries on is the sparse prefill kernel faster than the decode kernel?",
            "limits.SPARSE_DECODE_ROWS",
        ),
        _measurement(
            "host_link_bandwidth",
            "How fast are gather paths over the host link at row granularity?",
            "the order of the gather offers, and the cost model of HiSparse",
        ),
        _measurement(
            "dequantise_bandwidth",
            "How fast is dequant2d_per_token?",
            "whether weights are decoded after the all-gather or consumed as int8",
        ),
        _measurement(
            "int8_accuracy",
            "How exact is a quant2d and dequant2d_per_token round trip, and which row widths does quant2d take?",
            "the error bound of the int8_absmax wire",
        ),
        _measurement(
            "int8_product",
            "How exact is kunlun_ops.matmul on int8 rows with a factor each, and which widths does it take?",
            "whether int8_linear may consume gathered weights without decoding them",
        ),
        _measurement(
            "deep_ep_exchange",
            "Does deep_ep keep the order (source rank, token), carry factors exactly, and sum exactly on the way back?",
            "whether a group's int8 rows travel by deep_ep or by all_to_all_single",
        ),
        _measurement(
            "collective_overlap",
            "Does a BKCL collective run beside kernels of another stream, and can it be captured?",
            "the prefetch depth of attention sharding (0 when it does not)",
        ),
        _measurement(
            "transfer_capture",
            "Can batch_memcpy and the transfer kernels be captured in a graph?",
            "HiSparse inside full graphs",
        ),
    )
}

_answers: dict[tuple[str, str], Answer] = {}


def ask(name: str, device: DeviceInfo) -> Answer:
    """The answer of one question on this device, asked once a process.

    A probe that raises answers `ok=False` with the error: on an unknown build every failure is an answer.
    """
    key = (name, device.torch_device)
    if key not in _answers:
        _answers[key] = _run(QUESTIONS[name], device)
    return _answers[key]


def answer_all(device: DeviceInfo) -> Iterator[tuple[Question, Answer]]:
    """Every question with its answer, for `doctor`; slow ones take about a second."""
    for question in QUESTIONS.values():
        yield question, ask(question.name, device)


def forget() -> None:
    """Ask again next time (tests, and `doctor` after an installation)."""
    _answers.clear()


def _run(question: Question, device: DeviceInfo) -> Answer:
    module, _, function = question.probe.partition(":")
    probe = getattr(importlib.import_module(f"{_HERE}.{module}"), function)
    try:
        answer: Answer = probe(device)
    except Exception as error:  # vendor kernels raise anything; the reason is the answer
        return Answer(False, f"{type(error).__name__}: {error}")
    return answer
