"""Imports what both engines import of others, whatever their platform and settings, for the forks of all drivers."""

from __future__ import annotations

import importlib

for _name in (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.kernel.flex",
    "torch._inductor.lowering",
    "torch.distributed.tensor",
    "transformers.activations",
    "transformers.conversion_mapping",
    "transformers.generation.utils",
    "transformers.integrations.hub_kernels",
    "transformers.models.auto.modeling_auto",
    "aiohttp",
    "fastapi",
    "openai.types.responses",
):
    importlib.import_module(_name)
