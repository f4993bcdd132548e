"""HiSparse offload: a small hot KV buffer on the device, all KV in host memory, missing rows swapped in each step."""

from baige_device.optimizations.hisparse.cache import HotKVCache, SwapIn
from baige_device.optimizations.hisparse.config import HiSparseConfig
from baige_device.optimizations.hisparse.plan import HiSparsePlan, plan_hisparse

__all__ = ["HiSparseConfig", "HiSparsePlan", "HotKVCache", "SwapIn", "plan_hisparse"]
