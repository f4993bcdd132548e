"""Deliberately broken backends: the reference with one bug each, of the kinds that were seen in real kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from baige_device.backends.reference import plugin as reference
from baige_device.errors import OpUnsupported
from baige_device.ops import OP_NAMES
from baige_device.ops.fp8_all_gather.contract import GatherHandle
from baige_device.ops.host_alloc.contract import HostBuffer
from baige_device.ops.hot_cache_resolve.contract import ResolvePlan
from baige_device.ops.uva_sparse_gather.contract import num_rows
from baige_device.registry.hookspecs import hookimpl
from baige_device.registry.manager import Source
from baige_device.registry.offers import DeviceInfo, Offer, Tier

Op = Callable[..., Any]
Mutation = Callable[[Op], Op]
MUTANTS: dict[tuple[str, str], Mutation] = {}
"""(op, bug) -> what turns the reference implementation into the broken one."""


def mutant(*ops: str) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        for op in ops:
            MUTANTS[op, mutation.__name__] = mutation
        return mutation

    return register


def broken_source(op: str, mutation: Mutation, name: str = "broken") -> Source:
    """A backend that offers the reference for every op but one."""
    hooks: dict[str, Any] = {"baige_probe": reference.baige_probe}
    for known in OP_NAMES:
        hooks[known] = getattr(reference, known)
    target = mutation(hooks[op](DeviceInfo(name, "cpu", name)).load())

    def offer(device: DeviceInfo) -> Offer:
        return Offer(target, Tier.PORTABLE)

    offer.__name__ = op
    hooks[op] = hookimpl(offer)
    return Source(name, "a mutation test", lambda: SimpleNamespace(**hooks))


GATHER, SCATTER = "uva_sparse_gather", "uva_sparse_scatter"


@mutant(GATHER, SCATTER)
def wraps_offsets_at_32_bits(op: Op) -> Op:
    def broken(src: Any, dst: Any, src_rows: Any, dst_rows: Any, count: Any = None, **rest: Any) -> None:
        wrapped = (src_rows.long() * src.shape[-1]) % 2**32
        wrapped = torch.where(wrapped >= 2**31, wrapped - 2**32, wrapped) // src.shape[-1]
        safe = torch.where(src_rows < 0, src_rows.long(), wrapped.clamp(min=0))
        op(src, dst, safe.to(src_rows.dtype), dst_rows, count, **rest)

    return broken


@mutant(GATHER)
def minus_one_reads_the_last_row(op: Op) -> Op:
    def broken(src: Any, dst: Any, src_rows: Any, *rest: Any, **more: Any) -> None:
        op(src, dst, torch.where(src_rows == -1, num_rows(src) - 1, src_rows), *rest, **more)

    return broken


@mutant(GATHER)
def minus_one_leaves_the_row_stale(op: Op) -> Op:
    def broken(src: Any, dst: Any, src_rows: Any, dst_rows: Any, *rest: Any, **more: Any) -> None:
        op(src, dst, src_rows, torch.where(src_rows == -1, -1, dst_rows), *rest, **more)

    return broken


@mutant(SCATTER)
def minus_one_zeroes_the_backup(op: Op) -> Op:
    gather = reference.uva_sparse_gather(DeviceInfo("reference", "cpu", "cpu")).load()

    def broken(*args: Any, **more: Any) -> None:
        gather(*args, **more)

    return broken


@mutant(GATHER, SCATTER)
def minus_one_destination_is_the_last_row(op: Op) -> Op:
    def broken(src: Any, dst: Any, src_rows: Any, dst_rows: Any, *rest: Any, **more: Any) -> None:
        op(src, dst, src_rows, torch.where(dst_rows == -1, num_rows(dst) - 1, dst_rows), *rest, **more)

    return broken


@mutant(GATHER)
def ignores_the_offsets(op: Op) -> Op:
    def broken(*args: Any, dst_offsets: Any = None, **more: Any) -> None:
        op(*args, **more)

    return broken


@mutant(GATHER)
def moves_skipped_entries_by_the_offset(op: Op) -> Op:
    def broken(src: Any, dst: Any, src_rows: Any, dst_rows: Any, count: Any = None, **more: Any) -> None:
        offsets = more.pop("dst_offsets", None)
        if offsets is not None:
            dst_rows = dst_rows + (offsets[:, None] if dst_rows.dim() == 2 else offsets)
            dst_rows = torch.where((dst_rows < 0) | (dst_rows >= num_rows(dst)), -1, dst_rows)
        op(src, dst, src_rows, dst_rows, count, **more)

    return broken


@mutant(GATHER, SCATTER)
def ignores_the_count(op: Op) -> Op:
    def broken(src: Any, dst: Any, src_rows: Any, dst_rows: Any, count: Any = None, **more: Any) -> None:
        inside = (src_rows < num_rows(src)) & (dst_rows < num_rows(dst))
        op(src, dst, src_rows, torch.where(inside, dst_rows, -1), None, **more)

    return broken


@mutant(GATHER, SCATTER)
def copies_whole_vectors_only(op: Op) -> Op:
    def broken(src: Any, dst: Any, *rest: Any, **more: Any) -> None:
        vector = 16 // src.element_size()
        width = src.shape[-1] // vector * vector
        op(src[..., :width], dst[..., :width], *rest, **more)

    return broken


@mutant(GATHER, SCATTER)
def ignores_the_page_stride(op: Op) -> Op:
    def broken(src: Any, dst: Any, *rest: Any, **more: Any) -> None:
        op(src.as_strided((num_rows(src), src.shape[-1]), (src.shape[-1], 1)), dst, *rest, **more)

    return broken


@mutant(GATHER)
def writes_one_element_too_many(op: Op) -> Op:
    def broken(src: Any, dst: Any, *rest: Any, **more: Any) -> None:
        op(src, dst, *rest, **more)
        flat = torch.empty(0, dtype=torch.uint8).set_(dst.untyped_storage())
        flat[-1] ^= 1

    return broken


@mutant("host_alloc")
def memory_is_not_zeroed(op: Op) -> Op:
    return lambda num_bytes: HostBuffer(op(num_bytes).tensor.fill_(1), "pageable")


@mutant("host_alloc")
def rounds_up_to_a_power_of_two(op: Op) -> Op:
    return lambda num_bytes: op(2 ** math.ceil(math.log2(num_bytes)) if num_bytes > 1 else num_bytes)


@mutant("host_alloc")
def memory_is_misaligned(op: Op) -> Op:
    return lambda num_bytes: HostBuffer(op(num_bytes + 1).tensor[1:], "pageable")


def _resolve_rows(op: Op, change: Callable[[dict[str, Any], ResolvePlan], ResolvePlan]) -> Op:
    def broken(keys: Any, state_rows: Any, slot_keys: Any, lru_slots: Any, *, out: Any = None) -> ResolvePlan:
        args = {"keys": keys, "state_rows": state_rows, "slot_keys": slot_keys, "lru_slots": lru_slots}
        plan = op(keys, state_rows, slot_keys, lru_slots, out=out)
        return change(args, plan)

    return broken


RESOLVE = "hot_cache_resolve"


@mutant(RESOLVE)
def evicts_a_hit(op: Op) -> Op:
    def broken(keys: Any, state_rows: Any, slot_keys: Any, lru_slots: Any, **rest: Any) -> ResolvePlan:
        for row, state in enumerate(state_rows.tolist()):
            hits = torch.isin(slot_keys[state], keys[row]) & (slot_keys[state] >= 0) if state >= 0 else None
            if hits is not None and bool(hits.any()):
                slot_keys[state, int(hits.nonzero()[0])] = -1
        return op(keys, state_rows, slot_keys, lru_slots, **rest)

    return broken


@mutant(RESOLVE)
def hits_do_not_become_recent(op: Op) -> Op:
    def broken(keys: Any, state_rows: Any, slot_keys: Any, lru_slots: Any, **rest: Any) -> ResolvePlan:
        before = lru_slots.clone()
        plan = op(keys, state_rows, slot_keys, lru_slots, **rest)
        for state in range(lru_slots.shape[0]):
            loaded = set(plan.miss_slots[state_rows == state].flatten().tolist()) - {-1}
            old = before[state].tolist()
            order = [slot for slot in old if slot not in loaded] + [slot for slot in old if slot in loaded]
            lru_slots[state] = torch.tensor(order, dtype=lru_slots.dtype)
        return plan

    return broken


@mutant(RESOLVE)
def a_duplicate_loads_twice(op: Op) -> Op:
    def change(args: dict[str, Any], plan: ResolvePlan) -> ResolvePlan:
        for row in range(args["keys"].shape[0]):
            count = int(plan.miss_counts[row])
            if 0 < count < args["keys"].shape[1]:
                plan.miss_keys[row, count] = plan.miss_keys[row, 0]
                plan.miss_slots[row, count] = plan.miss_slots[row, 0]
                plan.miss_counts[row] += 1
        return plan

    return _resolve_rows(op, change)


@mutant(RESOLVE)
def the_tail_of_the_plan_is_stale(op: Op) -> Op:
    def change(args: dict[str, Any], plan: ResolvePlan) -> ResolvePlan:
        for row in range(args["keys"].shape[0]):
            plan.miss_keys[row, int(plan.miss_counts[row]) :] = 123456
        return plan

    return _resolve_rows(op, change)


@mutant(RESOLVE)
def padded_rows_are_counted(op: Op) -> Op:
    def change(args: dict[str, Any], plan: ResolvePlan) -> ResolvePlan:
        plan.miss_counts[args["state_rows"] == -1] = args["keys"].shape[1]
        return plan

    return _resolve_rows(op, change)


@mutant(RESOLVE)
def a_shared_miss_is_listed_in_every_row(op: Op) -> Op:
    def change(args: dict[str, Any], plan: ResolvePlan) -> ResolvePlan:
        first: dict[int, int] = {}
        for row, state in enumerate(args["state_rows"].tolist()):
            if state >= 0 and state in first and int(plan.miss_counts[first[state]]):
                for name in ("miss_keys", "miss_slots", "miss_counts"):
                    getattr(plan, name)[row] = getattr(plan, name)[first[state]]
            first.setdefault(state, row)
        return plan

    return _resolve_rows(op, change)


QUANTIZE = "quantize_blocks"


@mutant(QUANTIZE)
def a_zero_block_divides_by_zero(op: Op) -> Op:
    def broken(weight: Any, *, block: Any = (128, 128), **rest: Any) -> Any:
        payload, scales = op(weight, block=block, **rest)
        tile = weight[: block[0], : block[1] or None]
        if tile.numel() and not bool(tile.any()):
            scales[0, 0] = 0
        return payload, scales

    return broken


@mutant(QUANTIZE)
def one_scale_for_the_whole_weight(op: Op) -> Op:
    def broken(weight: Any, *, block: Any = (128, 128), **rest: Any) -> Any:
        payload, scales = op(weight, block=(max(weight.shape[0], 1), 0), **rest)
        return payload, scales.expand(op(weight, block=block, **rest)[1].shape).contiguous()

    return broken


@mutant(QUANTIZE)
def rounds_towards_zero(op: Op) -> Op:
    def broken(weight: Any, *, wire: str = "fp8_e4m3", **rest: Any) -> Any:
        payload, scales = op(weight, wire=wire, **rest)
        if wire == "int8_absmax" and scales.numel() == 1 and payload.numel():
            payload = (weight.float() / scales).trunc().to(torch.int8).contiguous()
        return payload, scales

    return broken


@mutant(QUANTIZE)
def accepts_nan(op: Op) -> Op:
    return lambda weight, **rest: op(weight.nan_to_num(), **rest)


@mutant(QUANTIZE)
def reads_a_strided_weight_as_dense(op: Op) -> Op:
    return lambda weight, **rest: op(weight.as_strided(weight.shape, (weight.shape[1], 1)), **rest)


@mutant("dequantize_blocks")
def scales_are_transposed(op: Op) -> Op:
    def broken(payload: Any, scales: Any, **rest: Any) -> Any:
        return op(payload, scales.t().reshape(scales.shape), **rest)

    return broken


@mutant("dequantize_blocks")
def ignores_out(op: Op) -> Op:
    return lambda payload, scales, *, out=None, **rest: op(payload, scales, **rest)


@mutant("dequantize_blocks")
def the_last_row_is_stale(op: Op) -> Op:
    def broken(payload: Any, scales: Any, *, out: Any = None, **rest: Any) -> Any:
        kept = None if out is None else out[-1:].clone()
        result = op(payload, scales, out=out, **rest)
        if kept is not None:
            out[-1:] = kept
        return result

    return broken


class _Late:
    """A gather whose second wait finds nothing."""

    def __init__(self, handle: GatherHandle) -> None:
        self.handle = handle
        self.waited = False

    def wait(self) -> torch.Tensor:
        image = self.handle.wait()
        if self.waited:
            image = torch.zeros_like(image)
        self.waited = True
        return image


@mutant("fp8_all_gather")
def the_second_wait_is_empty(op: Op) -> Op:
    return lambda *args, **rest: _Late(op(*args, **rest))


@mutant("fp8_all_gather")
def rounds_the_shard_to_words(op: Op) -> Op:
    def broken(shard: Any, shard_bytes: Any, *, group: Any = None, out: Any = None) -> Any:
        handle = op(shard, shard_bytes, group=group, out=out)
        handle.wait()[shard.numel() // 4 * 4 :] = 0
        return handle

    return broken


ATTENTION = ("attend_paged", "sparse_attention", "merge_attention")


@mutant(*ATTENTION)
def lse_is_to_base_2(op: Op) -> Op:
    def broken(*args: Any, **rest: Any) -> Any:
        out, lse = op(*args, **rest)
        lse.mul_(1 / math.log(2))
        return out, lse

    return broken


@mutant(*ATTENTION)
def overwrites_its_input(op: Op) -> Op:
    def broken(*args: Any, **rest: Any) -> Any:
        found = op(*args, **rest)
        first = rest["q"] if "q" in rest else rest["out_a"]
        if first.numel():
            first.mul_(0.5)
        return found

    return broken


def _attend(change: Callable[[dict[str, Any]], None]) -> Mutation:
    def mutation(op: Op) -> Op:
        def broken(**args: Any) -> Any:
            change(args)
            return op(**args)

        return broken

    return mutation


@mutant("attend_paged")
def sees_future_keys(op: Op) -> Op:
    return _attend(lambda args: args.update(causal=False))(op)


@mutant("attend_paged")
def the_window_is_one_too_wide(op: Op) -> Op:
    return _attend(lambda args: args.update(window=args["window"] and args["window"] + 1))(op)


@mutant("attend_paged")
def ignores_the_soft_cap(op: Op) -> Op:
    return _attend(lambda args: args.update(logits_soft_cap=0.0))(op)


@mutant("attend_paged")
def reads_whole_pages(op: Op) -> Op:
    def change(args: dict[str, Any]) -> None:
        page = args["k_cache"].shape[1]
        lens = args["seq_lens"]
        longer = (lens + page - 1) // page * page
        args["seq_lens"] = torch.where(args["q_starts"].diff() > 0, longer, lens)

    return _attend(change)(op)


@mutant("attend_paged")
def kv_heads_are_interleaved(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        heads, groups = args["q"].shape[1], args["k_cache"].shape[2]
        order = torch.arange(heads).view(groups, -1).t().flatten()
        out, lse = op(**{**args, "q": args["q"][:, order]})
        back = order.argsort()
        out.copy_(out[:, back].clone())
        lse.copy_(lse[:, back].clone())
        return out, lse

    return broken


@mutant("attend_paged", "sparse_attention")
def rows_without_keys_are_stale(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        out, lse = op(**args)
        out[lse.isinf()] = math.nan
        return out, lse

    return broken


@mutant("sparse_attention")
def minus_one_reads_row_zero(op: Op) -> Op:
    return _attend(lambda args: args.update(indices=args["indices"].clamp(min=0)))(op)


@mutant("sparse_attention")
def minus_one_reads_the_last_kv_row(op: Op) -> Op:
    def change(args: dict[str, Any]) -> None:
        k = args["k_rows"]
        rows = k.shape[0] * (k.shape[1] if k.dim() == 4 else 1)
        args["indices"] = torch.where(args["indices"] < 0, rows - 1, args["indices"])

    return _attend(change)(op)


@mutant("sparse_attention")
def a_masked_row_leaks_nan(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        out, lse = op(**args)
        values = args["k_rows"] if args["v_rows"] is None else args["v_rows"]
        if args.get("kv_format", "plain") == "plain" and bool((args["indices"] < 0).any()):
            out += 0 * values.flatten(0, -3)[0, 0, : out.shape[-1]].to(out.dtype)
        return out, lse

    return broken


@mutant("sparse_attention")
def ignores_the_second_set(op: Op) -> Op:
    return _attend(lambda args: args.update(extra_k=None, extra_v=None, extra_indices=None))(op)


@mutant("sparse_attention")
def every_head_uses_the_first_list(op: Op) -> Op:
    return _attend(lambda args: args.update(indices=args["indices"][:, :1].expand(args["indices"].shape)))(op)


@mutant("sparse_attention")
def wraps_kv_offsets_at_32_bits(op: Op) -> Op:
    def change(args: dict[str, Any]) -> None:
        width = args["k_rows"].shape[-1]
        offsets = args["indices"].long() * width
        wrapped = torch.where(offsets >= 2**31, offsets % 2**31, offsets) // width
        args["indices"] = torch.where(args["indices"] < 0, -1, wrapped)

    return _attend(change)(op)


@mutant("merge_attention")
def two_empty_parts_give_nan(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        out, lse = op(**args)
        out[lse.isinf()] = math.nan
        return out, lse

    return broken


@mutant("merge_attention")
def averages_the_parts(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        return op(**{**args, "lse_b": torch.where(args["lse_b"].isinf(), args["lse_b"], args["lse_a"])})

    return broken


INDEX = "index_topk"


@mutant(INDEX)
def ranks_future_keys(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        starts, lens = args["q_starts"], args["seq_lens"]
        result = op(**args)
        for row, length in enumerate(lens.tolist()):
            begin, end = int(starts[row]), int(starts[row + 1])
            if end - begin > 1 and length:
                result[begin, 0] = length - 1
        return result

    return broken


@mutant(INDEX)
def fills_up_with_zero(op: Op) -> Op:
    return lambda **args: op(**args).clamp_(min=0)


@mutant(INDEX)
def lists_the_best_twice(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        result = op(**args)
        if result.shape[1] > 1:
            result[:, 1] = result[:, 0]
        return result

    return broken


@mutant(INDEX)
def forgets_the_relu(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        q, keys = args["q"], args["k_cache"]
        if q.dtype == torch.float8_e4m3fn:
            return op(**args)
        both = torch.cat([q, -q], 1)
        return op(**{**args, "q": both, "weights": torch.cat([args["weights"], -args["weights"]], 1), "k_cache": keys})

    return broken


@mutant(INDEX)
def ignores_the_weights(op: Op) -> Op:
    return lambda **args: op(**{**args, "weights": torch.ones_like(args["weights"])})


WRITE = "kv_write"


@mutant(WRITE)
def minus_one_writes_the_last_slot(op: Op) -> Op:
    def broken(values: Any, cache: Any, slots: Any) -> None:
        last = cache.shape[0] * cache.shape[1] - 1
        op(values, cache, torch.where(slots == -1, last, slots))

    return broken


@mutant(WRITE)
def truncates_on_conversion(op: Op) -> Op:
    def broken(values: Any, cache: Any, slots: Any) -> None:
        if values.dtype == torch.float32 and cache.dtype == torch.bfloat16:
            values = (values.contiguous().view(torch.int32) & -65536).view(torch.float32)
        op(values, cache, slots)

    return broken


@mutant(WRITE)
def what_does_not_fit_becomes_nan(op: Op) -> Op:
    def broken(values: Any, cache: Any, slots: Any) -> None:
        if cache.dtype == torch.float8_e4m3fn != values.dtype:
            values = torch.where(values.abs() > 464, math.nan, values)
        op(values, cache, slots)

    return broken


@mutant(WRITE)
def nan_becomes_the_largest_number(op: Op) -> Op:
    def broken(values: Any, cache: Any, slots: Any) -> None:
        if cache.dtype == torch.float8_e4m3fn != values.dtype:
            values = torch.where(values.isnan(), 448.0, values)
        op(values, cache, slots)

    return broken


@mutant(WRITE)
def drops_the_last_token(op: Op) -> Op:
    return lambda values, cache, slots: op(values[: values.shape[0] // 4 * 4], cache, slots)


DISPATCH = "moe_dispatch"


@mutant(DISPATCH)
def padding_is_counted(op: Op) -> Op:
    def broken(*args: Any, **rest: Any) -> Any:
        batch = op(*args, **rest)
        if batch.expert_starts is not None:
            batch.expert_counts.copy_(batch.expert_starts.diff())
        return batch

    return broken


@mutant(DISPATCH)
def minus_one_goes_to_expert_zero(op: Op) -> Op:
    return lambda **args: op(**{**args, "topk_ids": args["topk_ids"].clamp(min=0)})


@mutant(DISPATCH)
def rows_behind_the_count_are_stale(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        batch = op(**args)
        if batch.layout == "masked" and batch.x.numel():
            batch.x[:, -1] = 1
        return batch

    return broken


@mutant(DISPATCH)
def tokens_of_an_expert_are_reversed(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        batch = op(**args)
        if batch.layout == "masked":
            for expert, count in enumerate(batch.expert_counts.tolist()):
                batch.x[expert, :count] = batch.x[expert, :count].flip(0).clone()
        return batch

    return broken


@mutant(DISPATCH)
def capacity_is_not_checked(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        return op(**{**args, "max_tokens_per_rank": max(args["max_tokens_per_rank"], args["x"].shape[0])})

    return broken


@mutant(DISPATCH)
def scales_are_not_moved(op: Op) -> Op:
    def broken(**args: Any) -> Any:
        batch = op(**args)
        if batch.scales is not None and batch.scales.numel():
            batch.scales.fill_(1.0)
        return batch

    return broken


@mutant("moe_expert_ffn")
def gate_and_up_are_swapped(op: Op) -> Op:
    def broken(batch: Any, w13: Any, w2: Any, **rest: Any) -> Any:
        return op(batch, torch.cat(w13.chunk(2, 1)[::-1], 1), w2, **rest)

    return broken


@mutant("moe_expert_ffn")
def ignores_the_activation(op: Op) -> Op:
    return lambda batch, w13, w2, *, activation="silu": op(batch, w13, w2)


@mutant("moe_combine")
def padding_rows_are_added(op: Op) -> Op:
    def broken(y: Any, batch: Any, *, out: Any = None) -> Any:
        result = op(y, batch, out=out)
        if batch.layout == "masked" and result.numel() and y.numel():
            result += 0 * y[:, -1].sum(0)
        return result

    return broken


@mutant("moe_combine")
def forgets_the_router_weights(op: Op) -> Op:
    def broken(y: Any, batch: Any, *, out: Any = None) -> Any:
        handle = batch.handle
        if handle.entry_weights is not None:
            handle.entry_weights.fill_(1.0)
        return op(y, batch, out=out)

    return broken


@mutant("moe_combine")
def tokens_without_an_expert_are_stale(op: Op) -> Op:
    def broken(y: Any, batch: Any, *, out: Any = None) -> Any:
        result = op(y, batch, out=out)
        result[(result == 0).all(1)] = math.nan
        return result

    return broken


@mutant("kv_write", "attend_paged")
def refuses_when_called(op: Op) -> Op:
    def broken(*args: Any, **rest: Any) -> Any:
        raise OpUnsupported("op", "broken", "the kernel does not like this shape")

    return broken
