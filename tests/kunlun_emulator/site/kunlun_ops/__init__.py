"""The Kunlun emulator's `kunlun_ops`: the kernels of the chosen profile, on CPU torch."""

import _kunlun_emulator_path

__emulator__ = True

_kunlun_emulator_path.admit("kunlun_ops")

from kunlun_emulator import kernels  # noqa: E402 - only once admitted

globals().update(kernels.namespace())
