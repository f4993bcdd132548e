"""The Kunlun emulator's `xtorch_ops` (old name of `kunlun_ops`): kernels of the chosen profile, on CPU torch."""

import _kunlun_emulator_path

__emulator__ = True

_kunlun_emulator_path.admit("xtorch_ops")

from kunlun_emulator import kernels  # noqa: E402 - only once admitted

globals().update(kernels.namespace())
