"""The settings of one engine: environment and file, overridden by its own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baige_device.errors import SettingsError
from baige_device.settings import Settings, load_settings

__all__ = ["engine_settings"]


def engine_settings(vllm_config: Any) -> Settings:
    """Environment and file, overridden by `--additional-config '{"baige": {...}}'`.

    Raises:
        SettingsError: an unknown option or a bad value.
    """
    additional = vllm_config.additional_config
    options = additional.get("baige", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(options, Mapping):
        raise SettingsError(f"--additional-config: baige: expected an object, got {options!r}")
    return load_settings(options)
