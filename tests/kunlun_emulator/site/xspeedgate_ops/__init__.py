"""The Kunlun emulator's `xspeedgate_ops`: importing it registers `torch.ops.xspeedgate_ops.*` of the chosen profile."""

import _kunlun_emulator_path

__emulator__ = True

_kunlun_emulator_path.admit("xspeedgate_ops")

from kunlun_emulator import speed  # noqa: E402 - only once admitted

speed.register()
