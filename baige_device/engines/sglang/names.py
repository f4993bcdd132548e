"""The names that SGLang's users can write: registered on every platform, they change nothing until they are chosen."""

from __future__ import annotations

from typing import Any

from baige_device.engines.sglang.ledger import ATTENTION_CHOICES, ATTENTION_REGISTRY, LEDGER, MLA_HANDLERS

__all__ = ["ATTENTION", "add_choice", "make_attention", "register"]

ATTENTION = "baige"
"""`--attention-backend baige`."""


def add_choice() -> None:
    """Let the command line accept the name; must run before the arguments are parsed."""
    from sglang.srt.arg_groups import choices

    LEDGER.note_seam(ATTENTION_CHOICES)
    choices.add_attention_backend_choices([ATTENTION])


def register() -> None:
    """Register the attention backend, once per process."""
    if ATTENTION_REGISTRY in LEDGER.applied:
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    add_choice()
    LEDGER.note_seam(ATTENTION_REGISTRY)
    register_attention_backend(ATTENTION)(make_attention)
    LEDGER.note_seam(MLA_HANDLERS)
    AttentionBackendRegistry.register(ATTENTION, _absorbed)


def make_attention(runner: Any) -> Any:
    """SGLang's factory of an attention backend; activates this process if nothing has yet."""
    from baige_device.engines.sglang.attention import BaigeAttention
    from baige_device.engines.sglang.worker import activate_worker

    return BaigeAttention(runner, activate_worker(runner, attention=True, experts=False))


def _absorbed(attention: Any, forward_batch: Any) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
