"""Measurements for `doctor`: what only hardware can settle and no op depends on for being right.

On the emulator the functional ones run, and none reports a time: a CPU's clock says nothing about the chip.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from baige_device.backends.kunlun import gather_memcpy, gather_staged, gather_transfer, quantise, sparse
from baige_device.backends.kunlun.host_alloc import host_alloc as allocate
from baige_device.backends.kunlun.int8_linear import int8_linear
from baige_device.backends.kunlun.open_questions import Answer
from baige_device.registry.offers import DeviceInfo

__all__ = [
    "collective_overlap",
    "deep_ep_exchange",
    "dequantise_bandwidth",
    "host_link_bandwidth",
    "int8_accuracy",
    "int8_product",
    "sparse_decode_or_prefill",
    "sparse_topk_alignment",
    "transfer_capture",
]

_NEEDS_CHIP = Answer(False, "not answered: a time needs the chip, this is the emulator")
_REPEATS = 20


def sparse_topk_alignment(device: DeviceInfo) -> Answer:
    """Try list widths that are no multiple of 2048."""
    q = torch.ones(2, 8, 576, dtype=torch.bfloat16, device=device.torch_device)
    pool = torch.ones(64, 576, dtype=torch.bfloat16, device=device.torch_device)
    taken = []
    for width in (1, 16, 64, 128, 512, 1024, 2048):
        lists = torch.full((2, width), -1, dtype=torch.int32, device=device.torch_device)
        lists[:, 0] = 63
        try:
            result, _ = sparse.attend_lists(q, pool, lists, 0.1)
            exact = bool((result == 1).all())
        except Exception:  # a width that the kernel refuses is an answer
            exact = False
        if exact:
            taken.append(width)
    return Answer(2048 in taken, f"widths that work, after padding to the limit: {taken}")


def sparse_decode_or_prefill(device: DeviceInfo) -> Answer:
    """Time both kernels for rising numbers of queries."""
    if device.facts.get("emulated"):
        return _NEEDS_CHIP
    pool = torch.randn(1 << 16, 576, device=device.torch_device).to(torch.bfloat16)
    lines = []
    for tokens in (64, 256, 1024):
        q = torch.randn(tokens, 64, 576, device=device.torch_device).to(torch.bfloat16)
        lists = torch.randint(0, 1 << 16, (tokens, 2048), dtype=torch.int32, device=device.torch_device)
        decode = _seconds(functools.partial(sparse.decode, q, pool, lists, 0.1))
        prefill = _seconds(functools.partial(sparse.prefill, q, pool, lists, 0.1))
        lines.append(f"{tokens} queries: decode {decode * 1e6:.0f} us, prefill {prefill * 1e6:.0f} us")
    return Answer(True, "; ".join(lines))


def host_link_bandwidth(device: DeviceInfo) -> Answer:
    """Gather 16384 rows of 1152 bytes by each path that this build has."""
    if device.facts.get("emulated"):
        return _NEEDS_CHIP
    count, width = 1 << 14, 1152
    lines = []
    with allocate(4 * count * width) as buffer:
        host = buffer.tensor.view(-1, width)
        pool = torch.zeros(count, width, dtype=torch.uint8, device=device.torch_device)
        source = torch.randperm(4 * count)[:count].to(device.torch_device)
        target = torch.arange(count, device=device.torch_device)
        for module in (gather_memcpy, gather_transfer, gather_staged):
            name = module.__name__.rpartition(".")[2]
            try:
                seconds = _seconds(functools.partial(module.uva_sparse_gather, host, pool, source, target))
                lines.append(f"{name} {count * width / seconds / 1e9:.1f} GB/s")
            except Exception as error:  # a path that this build lacks is part of the answer
                lines.append(f"{name} fails ({type(error).__name__})")
    return Answer(True, "; ".join(lines))


def dequantise_bandwidth(device: DeviceInfo) -> Answer:
    """Decode 64 MiB of int8 rows to bf16."""
    if device.facts.get("emulated"):
        return _NEEDS_CHIP
    payload = torch.ones(8192, 8192, dtype=torch.int8, device=device.torch_device)
    scales = torch.ones(8192, 1, device=device.torch_device)
    seconds = _seconds(lambda: quantise.dequantize_blocks(payload, scales, block=(1, 0)))
    return Answer(True, f"{3 * payload.numel() / seconds / 1e9:.0f} GB/s read and written")


def int8_accuracy(device: DeviceInfo) -> Answer:
    """Round trips of normal noise in rows of several widths; half a step is the bound."""
    lines, fine = [], True
    for width in (7, 128, 4096, 128 * 128):
        weight = torch.randn(8, width, generator=torch.Generator().manual_seed(width)).to(device.torch_device)
        payload, scales = quantise.quantize_blocks(weight, block=(1, 0), wire="int8_absmax")
        back = quantise.dequantize_blocks(payload, scales, block=(1, 0), dtype=torch.float32)
        steps = float(((back - weight).abs() / scales).max())
        fine = fine and steps <= 0.501
        lines.append(f"{width}: {steps:.3f}")
    return Answer(fine, f"largest error in steps by row width: {', '.join(lines)} (bound 0.5)")


def int8_product(device: DeviceInfo) -> Answer:
    """Products of several depths against float64, as a share of the bound that `int8_linear` states."""
    lines, fine = [], True
    for depth in (64, 1536, 7168):
        generator = torch.Generator().manual_seed(depth)
        x = torch.randn(5, depth, generator=generator).to(device.torch_device, torch.bfloat16)
        w = torch.randint(-127, 128, (48, depth), generator=generator).to(device.torch_device, torch.int8)
        scales = (torch.rand(48, 1, generator=generator) + 0.5).to(device.torch_device)
        got = int8_linear(x, w, scales).double().cpu()
        real = w.double().cpu() * scales.double().cpu()
        want = x.double().cpu() @ real.T
        step = 0.5 * x.double().cpu().abs().amax(1, keepdim=True) / 127
        share = float(((got - want).abs() / (step * real.abs().sum(1) + want.abs() / 256)).max())
        fine = fine and share <= 1.01
        lines.append(f"{depth}: {share:.2f}")
    return Answer(fine, f"largest error as a share of the bound by depth: {', '.join(lines)}")


def deep_ep_exchange(device: DeviceInfo) -> Answer:
    """Each group asks this itself at its first dispatch: it needs the group's ranks."""
    return Answer(False, "not answered: it needs several ranks; a group with deep_ep answers it at its first dispatch")


def collective_overlap(device: DeviceInfo) -> Answer:
    """Needs several ranks on the chip, which one process cannot set up."""
    return Answer(False, "not answered: it needs several ranks on chips, and this is one process")


def transfer_capture(device: DeviceInfo) -> Answer:
    """Capture one gather and replay it with another plan."""
    if device.facts.get("emulated"):
        return Answer(False, "not answered: the emulator has no graphs")
    with allocate(32 * 1152) as buffer:
        host = buffer.tensor.view(32, 1152)
        host.copy_(torch.arange(32, dtype=torch.uint8).view(32, 1).expand(32, 1152))
        pool = torch.zeros(4, 1152, dtype=torch.uint8, device=device.torch_device)
        source = torch.tensor([1, 2], device=device.torch_device)
        target = torch.tensor([0, 3], device=device.torch_device)
        gather_memcpy.uva_sparse_gather(host, pool, source, target)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gather_memcpy.uva_sparse_gather(host, pool, source, target)
        source.copy_(torch.tensor([7, 9]))
        graph.replay()
        moved = pool[[0, 3], 0].cpu().tolist()
    return Answer(moved == [7, 9], f"a replay with rows 7 and 9 moved rows {moved}")


def _seconds(call: Callable[[], object]) -> float:
    """Mean time of a call, after three warm-up calls, over a synchronised batch of repeats."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _REPEATS
