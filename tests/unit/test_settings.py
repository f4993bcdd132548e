"""Settings: sources, precedence, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from baige_device.errors import SettingsError
from baige_device.settings import load_settings


def test_defaults() -> None:
    settings = load_settings()
    assert settings.backend == "auto"
    assert settings.fallback == "none"
    assert settings.ops == {}
    assert settings.checks == "auto"
    assert settings.enabled


def test_engine_option_beats_environment_beats_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baige.toml"
    file.write_text('backend = "file"\nchecks = "none"\nfallback = "reference"\n[ops]\nkv_write = "off"\n')
    monkeypatch.setenv("BAIGE_CONFIG", str(file))
    monkeypatch.setenv("BAIGE_BACKEND", "environment")
    settings = load_settings({"fallback": "none"})
    assert (settings.backend, settings.checks, settings.fallback) == ("environment", "none", "none")
    assert settings.ops == {"kv_write": "off"}
    assert load_settings({"backend": "engine"}).backend == "engine"


def test_ops_of_all_sources_are_merged_op_by_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baige.toml"
    file.write_text('[ops]\nkv_write = "off"\nindex_topk = "off"\nattend_paged = "off"\n')
    monkeypatch.setenv("BAIGE_CONFIG", str(file))
    monkeypatch.setenv("BAIGE_OPS", "index_topk=portable,attend_paged=portable")
    merged = load_settings({"ops": {"attend_paged": "tuned"}}).ops
    assert merged == {"kv_write": "off", "index_topk": "portable", "attend_paged": "tuned"}
    assert load_settings({"ops": "attend_paged=tuned"}).ops == merged


def test_a_file_that_does_not_parse_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baige.toml"
    file.write_text("backend = \n")
    monkeypatch.setenv("BAIGE_CONFIG", str(file))
    with pytest.raises(SettingsError, match=r"BAIGE_CONFIG: '.*baige\.toml' is no valid TOML"):
        load_settings()


def test_ops_are_read_from_a_list_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAIGE_OPS", "attend_paged=portable, index_topk=off")
    assert load_settings().ops == {"attend_paged": "portable", "index_topk": "off"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BAIGE_BACKENDS", "x", r"unknown environment variable BAIGE_BACKENDS \(did you mean BAIGE_BACKEND\?\)"),
        ("BAIGE_BACKEND__NAME", "x", "unknown environment variable BAIGE_BACKEND__NAME"),
        ("BAIGE_CHECKS", "some", "setting checks.*'some'"),
        ("BAIGE_METRICS_PORT", "70000", "setting metrics_port"),
        ("BAIGE_OPS", "attend_page=portable", r"unknown op 'attend_page' \(did you mean attend_paged\?\)"),
        ("BAIGE_OPS", "attend_paged=fast", "expected tuned, portable, reference or off, got 'fast'"),
        ("BAIGE_OPS", "attend_paged", "expected `op=tier"),
        ("BAIGE_CONFIG", "/nonexistent.toml", "BAIGE_CONFIG: expected a TOML file, got '/nonexistent.toml'"),
    ],
)
def test_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_unknown_engine_option_names_the_near_match() -> None:
    with pytest.raises(SettingsError, match=r"setting fallbak.*did you mean fallback\?"):
        load_settings({"fallbak": "none"})


def test_fingerprint_follows_what_must_agree_across_ranks() -> None:
    assert load_settings({"metrics_port": 9000}).fingerprint() == load_settings().fingerprint()
    assert load_settings({"checks": "none"}).fingerprint() != load_settings().fingerprint()
