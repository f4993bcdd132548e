"""What `vllm_hisparse.py` watches in a running engine: when steps begin, and where their time goes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Profiler", "Steps"]


class Steps:
    """Watches the scheduler: when it was called, and for which batch."""

    def __init__(self, core: Any) -> None:
        self.requests = 0
        self.batches = hashlib.sha256()
        self.full: list[float] = []
        self.most_running = 0
        self.on_full: Callable[[int], None] = lambda count: None
        schedule = core.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            output = schedule(*args, **kwargs)
            tokens = output.num_scheduled_tokens
            self.most_running = max(self.most_running, len(tokens))
            self.batches.update(json.dumps(list(tokens.values())).encode())
            if self.requests and len(tokens) == self.requests == output.total_num_scheduled_tokens:
                self.full.append(now)
                self.on_full(len(self.full))
            elif output.total_num_scheduled_tokens:
                self.full.clear()  # a window of full batches is unbroken
            return output

        core.scheduler.schedule = watched

    def begin(self, requests: int) -> None:
        self.requests, self.most_running = requests, 0
        self.batches = hashlib.sha256()
        self.full.clear()

    def milliseconds(self) -> list[float]:
        return [1000 * (after - before) for before, after in zip(self.full, self.full[1:], strict=False)]


class Profiler:
    """Some steps under torch's profiler, then some under cProfile."""

    DEVICE_STEPS, HOST_STEPS = 4, 24

    def __init__(self, begin: int) -> None:
        self.steps = self.DEVICE_STEPS + self.HOST_STEPS + 4
        self.begin = begin
        self.device: Any = None
        self.host: Any = None

    def at(self, count: int) -> None:
        import cProfile

        import torch
        from torch.profiler import ProfilerActivity, profile

        step = count - self.begin
        if step == 1:
            torch.cuda.synchronize()
            self.device = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.device.__enter__()
        elif step == 1 + self.DEVICE_STEPS:
            torch.cuda.synchronize()
            self.device.__exit__(None, None, None)
        elif step == 2 + self.DEVICE_STEPS:
            self.host = cProfile.Profile()
            self.host.enable()
        elif step == 2 + self.DEVICE_STEPS + self.HOST_STEPS:
            self.host.disable()

    def report(self) -> dict[str, Any]:
        import pstats

        from torch.autograd import DeviceType

        if self.device is None or self.host is None:
            return {}
        events = [event for event in self.device.key_averages() if event.device_type == DeviceType.CUDA]
        events.sort(key=lambda event: -event.self_device_time_total)
        kernels = [
            {
                "kernel": event.key[:90],
                "us_a_step": round(event.self_device_time_total / self.DEVICE_STEPS, 1),
                "launches_a_step": round(event.count / self.DEVICE_STEPS, 1),
            }
            for event in events[:28]
        ]
        stats = pstats.Stats(self.host).stats  # type: ignore[attr-defined]
        rows = sorted(stats.items(), key=lambda item: -item[1][3])
        functions = [
            {
                "function": f"{'/'.join(file.split('/')[-2:])}:{line} {name}",
                "ms_a_step": round(1000 * cumulative / self.HOST_STEPS, 3),
                "own_ms_a_step": round(1000 * own / self.HOST_STEPS, 3),
                "calls_a_step": round(calls / self.HOST_STEPS, 1),
            }
            for (file, line, name), (_, calls, own, cumulative, _) in rows[:90]
        ]
        return {
            "device_us_a_step": round(sum(event.self_device_time_total for event in events) / self.DEVICE_STEPS, 1),
            "kernels": kernels,
            "python": functions,
        }
