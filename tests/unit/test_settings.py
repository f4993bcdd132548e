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


def test_hisparse_is_off_by_default() -> None:
    hisparse = load_settings().hisparse
    assert not hisparse.enabled
    assert (hisparse.hot_tokens, hisparse.host_gib_per_node, hisparse.overlap) == (0, 0, False)


def test_hisparse_of_all_sources_is_merged_field_by_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baige.toml"
    file.write_text("[hisparse]\nhost_gib_per_node = 100.5\nhot_tokens = 1024\noverlap = true\n")
    monkeypatch.setenv("BAIGE_CONFIG", str(file))
    monkeypatch.setenv("BAIGE_HISPARSE__HOT_TOKENS", "2048")
    monkeypatch.setenv("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "200")
    hisparse = load_settings({"hisparse": {"host_gib_per_node": 300}}).hisparse
    assert hisparse.enabled
    assert (hisparse.host_gib_per_node, hisparse.hot_tokens, hisparse.overlap) == (300, 2048, True)


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
        ("BAIGE_OPS", "attend_paged", "setting ops: expected `op=tier"),
        (
            "BAIGE_OPS",
            "attend_paged=off, attend_paged=portable",
            "setting ops: op 'attend_paged' is given twice, as off and as portable",
        ),
        (
            "BAIGE_HISPARSE__HOT_TOKEN",
            "1",
            r"unknown environment variable BAIGE_HISPARSE__HOT_TOKEN \(did you mean BAIGE_HISPARSE__HOT_TOKENS\?\)",
        ),
        ("BAIGE_HISPARSE", "{}", r"unknown environment variable BAIGE_HISPARSE \(did you mean BAIGE_HISPARSE__"),
        ("BAIGE_HISPARSE_HOT_TOKENS", "1", r"did you mean BAIGE_HISPARSE__HOT_TOKENS\?"),
        ("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "-1", "setting hisparse.host_gib_per_node: .*'-1'"),
        ("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "inf", "setting hisparse.host_gib_per_node: .*finite"),
        (
            "BAIGE_HISPARSE__HOST_GIB_PER_NODE",
            "1e300",
            "setting hisparse.host_gib_per_node: .*equal to 1000000, got '1e300'",
        ),
        ("BAIGE_HISPARSE__HOT_TOKENS", "9999999999", "setting hisparse.hot_tokens: .*equal to 16777216"),
        ("BAIGE_HISPARSE__HOST_GIB_PER_NODE", "64GiB", "setting hisparse.host_gib_per_node: .*'64GiB'"),
        ("BAIGE_CONFIG", "/nonexistent.toml", "expected a TOML file, got '/nonexistent.toml', which does not exist"),
        ("BAIGE_CONFIG", "/", "BAIGE_CONFIG: expected a TOML file, got '/', which is a folder"),
        ("BAIGE_CONFIG", "/dev/null", "which is no regular file"),
    ],
)
def test_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baige.toml"
    file.write_text("")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)  # root, as in containers, may read everything
    monkeypatch.setenv("BAIGE_CONFIG", str(file))
    with pytest.raises(SettingsError, match=r"BAIGE_CONFIG: '.*baige\.toml' cannot be read: .*Permission denied"):
        load_settings()


def test_an_op_is_not_given_twice_in_an_engine_option_either() -> None:
    with pytest.raises(SettingsError, match="setting ops: op 'kv_write' is given twice, as off and as off"):
        load_settings({"ops": "kv_write=off,kv_write=off"})


def test_unknown_engine_option_names_the_near_match() -> None:
    with pytest.raises(SettingsError, match=r"setting fallbak.*did you mean fallback\?"):
        load_settings({"fallbak": "none"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hisparse": {"hot_token": 1}}, r"setting hisparse\.hot_token: .*did you mean hisparse\.hot_tokens\?.*got 1"),
        ({"hisparze": {"hot_tokens": 1}}, r"setting hisparze: .*hisparse"),
        ({"hisparse": 64}, "setting hisparse: .*got 64"),
        ({"hisparse": {"hot_tokens": 1.5}}, "setting hisparse.hot_tokens"),
    ],
)
def test_a_bad_hisparse_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(options)


def test_hisparse_is_part_of_what_ranks_compare() -> None:
    ours = load_settings({"hisparse": {"host_gib_per_node": 8}})
    assert ours.fingerprint() != load_settings().fingerprint()
    assert ours.common()["hisparse"] == {"host_gib_per_node": 8.0, "hot_tokens": 0, "overlap": False}


def test_fingerprint_follows_what_must_agree_across_ranks() -> None:
    assert load_settings({"metrics_port": 9000}).fingerprint() == load_settings().fingerprint()
    assert load_settings({"checks": "none"}).fingerprint() != load_settings().fingerprint()
