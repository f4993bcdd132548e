"""FlashAttention 3's forward op behind one interface, from whichever build is there.

vLLM registers its build as `torch.ops._vllm_fa3_C`, FlashAttention's own package is `flash_attn_3`. Their ops take the
same arguments but for a few, so a call names its values and the op's own schema puts them in order. Only what is loaded
or installed already is used; nothing is imported from an engine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NAMED", "FlashAttention", "adapt", "find_flash_attention"]

_ENGINE, _PACKAGE = "_vllm_fa3_C", "flash_attn_3"
NAMED = (
    "q",
    "k",
    "v",
    "q_v",
    "out",
    "cu_seqlens_q",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "page_table",
    "leftpad_k",
    "softmax_scale",
    "is_causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "num_splits",
)
"""The arguments that a call gives, by the names of the op's schema."""
_FIXED: Mapping[str, Any] = {
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""What the features that are not used get where the schema names no default."""


@dataclass(frozen=True)
class FlashAttention:
    """One build's forward op."""

    name: str
    op: Callable[..., Sequence[Tensor]]
    arguments: tuple[tuple[str, Any], ...]
    """The op's arguments in its order: name, and the value where a call gives none."""

    def __call__(self, **values: Any) -> tuple[Tensor, Tensor]:
        """Run the op with `NAMED` values; missing ones are None. Returns out `[T, H, Dv]` and lse `[H, T]`.

        Rows that belong to no request are left unwritten in both. Queries without keys give 0 and -inf.
        """
        found = self.op(*[values.get(name, other) for name, other in self.arguments])
        return found[0], found[1]


def find_flash_attention() -> tuple[FlashAttention | None, str]:
    """The host engine's build when it is loaded, else the installed package; or None and the reason."""
    if hasattr(getattr(torch.ops, _ENGINE), "fwd"):
        return _from_namespace(_ENGINE)
    return _package()


def adapt(name: str, op: Any) -> FlashAttention | None:
    """The op behind the interface, or None when its schema lacks a `NAMED` argument or wants an unknown one."""
    arguments: list[tuple[str, Any]] = []
    for argument in op.default._schema.arguments:
        if argument.has_default_value():
            other = argument.default_value
        elif argument.name in _FIXED:
            other = _FIXED[argument.name]
        elif argument.name in NAMED or str(argument.type).startswith("Optional"):
            other = None
        else:
            return None
        arguments.append((argument.name, other))
    if not set(NAMED) <= {argument for argument, _ in arguments}:
        return None
    return FlashAttention(name, op.default, tuple(arguments))


def _from_namespace(namespace: str) -> tuple[FlashAttention | None, str]:
    name = f"torch.ops.{namespace}"
    found = adapt(name, getattr(torch.ops, namespace).fwd)
    return found, "" if found else f"{name}.fwd takes other arguments than those known"


@functools.lru_cache(maxsize=1)
def _package() -> tuple[FlashAttention | None, str]:
    """Loading the package's library registers its ops; it makes no CUDA context."""
    extension = f"{_PACKAGE}._C"
    try:
        if importlib.util.find_spec(_PACKAGE) is None or importlib.util.find_spec(extension) is None:
            return None, f"the package {_PACKAGE} is not installed, and no engine has loaded its own build"
        importlib.import_module(extension)
    except (ImportError, OSError) as error:
        return None, f"the package {_PACKAGE} cannot be loaded: {error}"
    return _from_namespace(_PACKAGE)
