"""The libraries of both engines, on a host that is prepared for SGLang: transformers asks for torchvision."""

from __future__ import annotations

from tests.engines.sglang import host

host.prepare()

import tests.engines.libraries  # noqa: E402, F401
