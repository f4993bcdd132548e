"""The Kunlun emulator's `torch_xmlir`: a test double on CPU torch, no hardware."""

import _kunlun_emulator_path

__emulator__ = True

_kunlun_emulator_path.admit("torch_xmlir")

from kunlun_emulator import patches  # noqa: E402 - only once admitted

patches.apply()
