"""The grammar bitmask under the chip's rules: capturable, and without a host sync."""

from __future__ import annotations

import torch
from kunlun_emulator import STATE, chip_rules, installed

from baige_device.engines.grammar import apply_token_bitmask


def test_capturable_and_without_a_sync() -> None:
    with installed("torch2.9"), chip_rules(capture=True):
        logits, bitmask = torch.randn(3, 70, dtype=torch.float16), torch.randint(-(1 << 31), 1 << 31, (3, 3)).int()
        apply_token_bitmask(logits, bitmask, torch.tensor([0, 2]))
        apply_token_bitmask(logits, bitmask)
        assert STATE.syncs == 0
