"""Settings: a TOML file, `BAIGE_*` environment variables and engine options, in rising order.

The file is `$BAIGE_CONFIG`; nothing is read when that is unset. In vLLM engine options come from
`--additional-config '{"baige": {...}}'`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from baige_device.errors import SettingsError

__all__ = ["ENV_PREFIX", "HiSparseSettings", "Settings", "env_name", "load_settings", "settings_fields"]

ENV_PREFIX = "BAIGE_"
_NESTED = "__"
"""Between the group and the field in an environment variable: `BAIGE_HISPARSE__HOT_TOKENS`."""
_RESERVED_ENV = {"BAIGE_CONFIG", "BAIGE_CACHE"}
"""Variables that are read outside `Settings`: where the file is, and where kernels, environments and models are."""
_MOST_HOST_GIB = 1e6
_MOST_HOT_TOKENS = 1 << 24
"""Bounds beyond any machine and any model; they keep a slip of the finger from arithmetic that overflows."""


class _Environment(EnvSettingsSource):
    """The environment, with `ops` as a mapping, so that it merges op by op with the other sources."""

    def __call__(self) -> dict[str, Any]:
        return _map_ops(super().__call__())


class HiSparseSettings(BaseModel):
    """HiSparse offload: a small hot KV buffer on the device, all KV in host memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_gib_per_node: float = Field(
        default=0,
        ge=0,
        le=_MOST_HOST_GIB,
        allow_inf_nan=False,
        description="Host memory for KV on one node, in GiB, split evenly over its local ranks; 0 is HiSparse off.",
    )
    hot_tokens: int = Field(
        default=0,
        ge=0,
        le=_MOST_HOT_TOKENS,
        description="Tokens of a request that stay on the device, per layer; 0 is twice the model's top-k, in vLLM one "
        "top-k more for each speculated token.",
    )
    overlap: bool = Field(
        default=False,
        description="Attend the hits while the misses are in flight and merge both by their LSE: hides the transfer at "
        "the price of a second launch and a merge.",
    )

    @property
    def enabled(self) -> bool:
        """Whether any host memory is given to HiSparse."""
        return self.host_gib_per_node > 0


class Settings(BaseSettings):
    """What a user can decide. Every field is also `BAIGE_<FIELD>`, one of a group `BAIGE_<GROUP>__<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=_NESTED, extra="forbid", frozen=True)

    backend: str = Field(
        "auto",
        description="`auto` (the one chip that is present, else `reference`), `off` (nothing is mounted), or a "
        "backend's name.",
    )
    fallback: Literal["none", "reference"] = Field(
        "none",
        description="`reference` lets ops that the chip does not serve run on the slow reference; each such op is "
        "logged once, counted and shown by `doctor`.",
    )
    ops: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        description="Choice per op, `op=tier` or `op=off`, comma separated: `attend_paged=portable,index_topk=off`. "
        "Tiers: `tuned`, `portable`, `reference`. `off` leaves the op to the host engine. Sources are merged op by op.",
    )
    checks: Literal["auto", "none", "shapes", "values"] = Field(
        "auto",
        description="What every call verifies: nothing, shapes, dtypes and strides (no device sync), or also values "
        "(synchronises; for debugging). `auto`: shapes for ops on the reference, nothing for a chip's own kernels, "
        "whose launches the checks would outlast.",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Serve Prometheus metrics of this process on `127.0.0.1:<metrics_port + rank>`; 0 is off.",
    )
    hisparse: HiSparseSettings = Field(
        HiSparseSettings(),
        description="HiSparse offload of KV to host memory. Sources are merged field by field.",
    )

    @field_validator("ops", mode="before")
    @classmethod
    def _read_ops(cls, value: object) -> object:
        return _parse_ops(value) if isinstance(value, str) else value

    @field_validator("ops")
    @classmethod
    def _check_ops(cls, value: dict[str, str]) -> dict[str, str]:
        from baige_device.ops import OP_NAMES

        for op, tier in value.items():
            if op not in OP_NAMES:
                raise ValueError(f"unknown op {op!r}{_near(op, OP_NAMES)}")
            if tier not in ("tuned", "portable", "reference", "off"):
                raise ValueError(f"op {op!r}: expected tuned, portable, reference or off, got {tier!r}")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, _Environment(settings_cls)]
        path = os.environ.get("BAIGE_CONFIG")
        if path:
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=Path(path)))
        return tuple(sources)

    @property
    def enabled(self) -> bool:
        """False when the user asked for `backend=off`."""
        return self.backend != "off"

    def common(self) -> dict[str, Any]:
        """What must be equal in all processes of a server, as plain values."""
        return self.model_dump(mode="json", exclude={"metrics_port"})

    def fingerprint(self) -> str:
        """Twelve hex digits that are equal exactly when two processes run with the same settings."""
        text = json.dumps(self.common(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def settings_fields() -> dict[str, FieldInfo]:
    """Every setting under its full name (`backend`, `hisparse.hot_tokens`), groups opened."""
    found: dict[str, FieldInfo] = {}
    for name, info in Settings.model_fields.items():
        group = info.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            found |= {f"{name}.{field}": nested for field, nested in group.model_fields.items()}
        else:
            found[name] = info
    return found


def env_name(setting: str) -> str:
    """The environment variable of a setting: `BAIGE_HISPARSE__HOT_TOKENS` for `hisparse.hot_tokens`."""
    return ENV_PREFIX + setting.upper().replace(".", _NESTED)


def load_settings(overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings of this process; `overrides` are engine options and win.

    Raises:
        SettingsError: an unknown `BAIGE_*` variable or option (the near match is named), a bad value, an op given
            twice, or a `$BAIGE_CONFIG` that does not exist, is a folder, cannot be read or is no TOML.
    """
    _refuse_unknown(key for key in os.environ if key.startswith(ENV_PREFIX))
    path = os.environ.get("BAIGE_CONFIG")
    try:
        if path:
            _refuse_no_file(Path(path))
        return Settings(**_map_ops(overrides or {}))
    except ValidationError as error:
        raise SettingsError(_explain(error)) from error
    except OSError as error:
        raise SettingsError(f"BAIGE_CONFIG: {path!r} cannot be read: {error}") from error
    except ValueError as error:  # TOMLDecodeError, of tomllib or tomli
        raise SettingsError(f"BAIGE_CONFIG: {path!r} is no valid TOML: {error}") from error


def _refuse_no_file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise SettingsError(f"BAIGE_CONFIG: expected a TOML file, got {str(path)!r}, which {what}")


def _map_ops(values: Mapping[str, Any]) -> dict[str, Any]:
    """A source's values with `ops` as a mapping."""
    text = values.get("ops")
    if not isinstance(text, str):
        return dict(values)
    try:
        return {**values, "ops": _parse_ops(text)}
    except ValueError as error:
        raise SettingsError(f"setting ops: {error}, got {text!r}") from error


def _parse_ops(value: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in (part.strip() for part in value.split(",") if part.strip()):
        if pair.count("=") != 1:
            raise ValueError(f"expected `op=tier[,op=tier...]`, got {pair!r}")
        op, tier = (part.strip() for part in pair.split("="))
        if op in found:
            raise ValueError(f"op {op!r} is given twice, as {found[op]} and as {tier}")
        found[op] = tier
    return found


def _refuse_unknown(names: Iterable[str]) -> None:
    known = {env_name(setting) for setting in settings_fields()} | _RESERVED_ENV
    for name in sorted(names):
        if name not in known:
            raise SettingsError(f"unknown environment variable {name}{_near(name, known)}")


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else f"; known: {', '.join(sorted(known))}"


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "settings"
        hint = _near(where, settings_fields()) if item["type"] == "extra_forbidden" else ""
        lines.append(f"setting {where}: {item['msg']}{hint}, got {item.get('input')!r}")
    return "; ".join(lines)
