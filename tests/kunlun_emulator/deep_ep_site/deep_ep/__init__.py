"""The Kunlun emulator's `deep_ep`: the vendor's port of DeepEP over the process group, no hardware."""

import _kunlun_emulator_path

__emulator__ = True

_kunlun_emulator_path.admit("deep_ep")
