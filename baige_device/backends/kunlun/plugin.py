"""What the Kunlun backend offers. Light: nothing of the vendor, and no torch, is imported until an op is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.offers import DeviceInfo, Finding, Need, Offer, Probe, Tier, Verdict

_HERE = "baige_device.backends.kunlun"
_SYNC = {"host_synchronises": True, "graph_capturable": False}
_FREE = {"host_synchronises": False}


@hookimpl
def baige_hardware() -> Verdict:
    from baige_device.backends.kunlun import probe

    return probe.hardware()


@hookimpl
def baige_probe() -> Probe:
    from baige_device.backends.kunlun import probe

    return probe.probe()


@hookimpl
def baige_findings(device: DeviceInfo) -> Sequence[Finding]:
    from baige_device.backends.kunlun import open_questions

    return [
        Finding(question.name, answer.ok, f"{question.question} {answer.detail}", question.decides)
        for question, answer in open_questions.answer_all(device)
    ]


def _offer(
    target: str,
    tier: Tier,
    device: DeviceInfo,
    *,
    ops: Iterable[str] = (),
    tests: Iterable[str] = (),
    facts: Mapping[str, object] = _FREE,
) -> Offer:
    """An offer whose availability is the vendor build's: the named ops exist and the named self-tests pass."""
    from baige_device.backends.kunlun import open_questions, vendor

    available = vendor.require(ops)
    for test in tests if available else ():
        answer = open_questions.ask(test, device)
        if not answer.ok:
            available = Verdict.no(f"self-test {test} fails: {answer.detail}")
            break
    return Offer(f"{_HERE}.{target}", tier, _rule(target, device), available, facts)


def _rule(target: str, device: DeviceInfo) -> Callable[[Need], Verdict]:
    from baige_device.backends.kunlun import supports

    return functools.partial(supports.judge, target, device)


@hookimpl
def host_alloc(device: DeviceInfo) -> Offer:
    return _offer("host_alloc:host_alloc", Tier.TUNED, device, tests=["host_register"], facts={"kind": "pinned"})


def _copies(op: str, device: DeviceInfo) -> list[Offer]:
    memcpy, transfer = "xspeedgate_ops.batch_memcpy", "xspeedgate_ops.transfer_kv_per_layer_mla"
    return [
        _offer(f"gather_memcpy:{op}", Tier.TUNED, device, ops=[memcpy], tests=["host_pointer_copy"]),
        _offer(
            f"gather_transfer:{op}", Tier.TUNED, device, ops=[transfer], tests=["transfer_row_granularity"], facts=_SYNC
        ),
        _offer(f"gather_staged:{op}", Tier.PORTABLE, device, facts=_SYNC),
    ]


@hookimpl
def uva_sparse_gather(device: DeviceInfo) -> list[Offer]:
    return _copies("uva_sparse_gather", device)


@hookimpl
def uva_sparse_scatter(device: DeviceInfo) -> list[Offer]:
    return _copies("uva_sparse_scatter", device)


@hookimpl
def hot_cache_resolve(device: DeviceInfo) -> Offer:
    facts = {**_FREE, "graph_capturable": True, "eviction": "lru"}
    return _offer("resolve:hot_cache_resolve", Tier.PORTABLE, device, facts=facts)


@hookimpl
def quantize_blocks(device: DeviceInfo) -> Offer:
    facts = {"wire_formats": ("int8_absmax",), "host_synchronises": True}
    return _offer("quantise:quantize_blocks", Tier.TUNED, device, ops=["kunlun_ops.quant2d"], facts=facts)


@hookimpl
def dequantize_blocks(device: DeviceInfo) -> Offer:
    facts = {**_FREE, "wire_formats": ("int8_absmax",)}
    return _offer("quantise:dequantize_blocks", Tier.TUNED, device, ops=["kunlun_ops.dequant2d_per_token"], facts=facts)


@hookimpl
def fp8_all_gather(device: DeviceInfo) -> Offer:
    facts = {**_FREE, "transports": ("torch.distributed",), "copy_engine": False, "peer_to_peer": False}
    return _offer("all_gather:fp8_all_gather", Tier.TUNED, device, facts=facts)


@hookimpl
def attend_paged(device: DeviceInfo) -> Offer:
    ops = [
        "kunlun_ops.prefill_attention",
        "kunlun_ops.fwd_kvcache_mla",
        "kunlun_ops.sparse_prefill_fwd_opt",
        "kunlun_ops.attention_merge_stage",
    ]
    return _offer(
        "attend:attend_paged", Tier.TUNED, device, ops=ops, tests=["window_counts_self", "sparse_lists"], facts=_SYNC
    )


@hookimpl
def sparse_attention(device: DeviceInfo) -> list[Offer]:
    ops = [
        "kunlun_ops.fwd_kvcache_mla",
        "kunlun_ops.sparse_prefill_fwd_opt",
        "kunlun_ops.attention_merge_stage",
    ]
    facts = {**_FREE, "kv_formats": ("plain",)}
    return [
        _offer("sparse:sparse_attention", Tier.TUNED, device, ops=ops, tests=["sparse_lists"], facts=facts),
        _offer("sparse_portable:sparse_attention", Tier.PORTABLE, device, facts=facts),
    ]


@hookimpl
def merge_attention(device: DeviceInfo) -> list[Offer]:
    return [
        _offer("partial:merge_attention", Tier.TUNED, device, ops=["kunlun_ops.attention_merge_stage"]),
        _offer("partial:merge_attention_portable", Tier.PORTABLE, device),
    ]


@hookimpl
def index_topk(device: DeviceInfo) -> list[Offer]:
    ops = [
        "kunlun_ops.I8_paged_mqa_logits",
        "kunlun_ops.I8_mqa_logits",
        "xspeedgate_ops.mask_for_I8_mqa_logits",
    ]
    return [
        _offer("index:index_topk", Tier.TUNED, device, ops=[*ops, *_topk_op()], tests=["index_order"], facts=_SYNC),
        _offer("index_portable:index_topk", Tier.PORTABLE, device, facts=_SYNC),
    ]


def _topk_op() -> list[str]:
    from baige_device.backends.kunlun import vendor

    return [] if vendor.has("xspeedgate_ops.topk_per_row") else ["kunlun_ops.fast_topkv2"]


@hookimpl
def kv_write(device: DeviceInfo) -> list[Offer]:
    ops = ["kunlun_ops.concat_and_cache_mla", "kunlun_ops.reshape_and_cache_flash"]
    return [
        _offer("kv_write:kv_write", Tier.TUNED, device, ops=ops, tests=["cache_write_skips"]),
        _offer("kv_write:kv_write_portable", Tier.PORTABLE, device, facts={**_FREE, "graph_capturable": True}),
    ]


_SORT_OPS = ("xspeedgate_ops.moe_pre_small", "kunlun_ops.gen_block_statistic", "kunlun_ops.moe_pre_sorted")
_LAYOUTS = {"layouts": ("flat", "expert_major", "masked")}


_DEEP_EP = tuple(
    f"deep_ep.{member}" for member in ("dispatch", "combine", "get_dispatch_config", "get_combine_config", "num_sms")
)


@hookimpl
def moe_dispatch(device: DeviceInfo) -> list[Offer]:
    """Ranks compare the chosen offer, so a rank without deep_ep among others stops the start."""
    from baige_device.backends.kunlun import moe_exchange

    plain = moe_exchange.reason(str(device.facts.get("distributed_backend", "nccl")))
    proven = f"deep_ep: on groups that prove it at their first dispatch (probe deep_ep_exchange); else {plain}"
    facts = {**_SYNC, **_LAYOUTS}
    return [
        _offer(
            "moe_deep_ep:moe_dispatch",
            Tier.TUNED,
            device,
            ops=(*_SORT_OPS, *_DEEP_EP),
            tests=["moe_order"],
            facts={**facts, "transport": proven},
        ),
        _offer(
            "moe:moe_dispatch",
            Tier.TUNED,
            device,
            ops=_SORT_OPS,
            tests=["moe_order"],
            facts={**facts, "transport": plain},
        ),
    ]


@hookimpl
def moe_expert_ffn(device: DeviceInfo) -> Offer:
    ops = [
        *_SORT_OPS,
        "kunlun_ops.moe_fc",
        "kunlun_ops.moe_post",
        "kunlun_ops.swiglu",
        "kunlun_ops.m_grouped_gemm_bf16_bf16_bf16_nt_masked",
    ]
    return _offer("moe_ffn:moe_expert_ffn", Tier.TUNED, device, ops=ops, facts={**_FREE, **_LAYOUTS})


@hookimpl
def moe_combine(device: DeviceInfo) -> Offer:
    return _offer("moe:moe_combine", Tier.TUNED, device, ops=["kunlun_ops.moe_post"], facts={**_FREE, **_LAYOUTS})
