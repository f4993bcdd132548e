"""Who provides vLLM's platform, and that every reason against it is loud (user-demand cases A1, A2, A5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.fakes import distribution, host_tensor_backend
from tests.engines.vllm.engine import ROOT, environment, run

OURS = "baige_device.engines.vllm.platform.BaigePlatform"
NOBODY = "vllm.platforms.interface.UnspecifiedPlatform"
NAMES = ["BAIGE", "BAIGE_MLA", "BAIGE_MLA_SPARSE", "BAIGE_DSA_INDEXER"]


def other_platform(folder: Path) -> str:
    return distribution(
        folder,
        "otherchip",
        entry_points="[vllm.platform_plugins]\nother = other_chip:platform\n",
        modules={
            "other_chip": "from vllm.platforms.interface import UnspecifiedPlatform as Other\n\n\n"
            "def platform():\n    return 'other_chip.Other'\n"
        },
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sites")
    other = other_platform(folder)
    chip = host_tensor_backend(folder)
    off = folder / "off.toml"
    off.write_text('backend = "off"\n')
    cases: dict[str, tuple[dict[str, str], list[str]]] = {
        "off": ({"BAIGE_BACKEND": "off"}, []),
        "off by file": ({"BAIGE_CONFIG": str(off)}, [distribution(folder, "vllm", "0.35.0")]),
        "auto": ({}, []),
        "reference": ({"BAIGE_BACKEND": "reference"}, []),
        "cuda": ({"BAIGE_BACKEND": "cuda"}, []),
        "unknown": ({"BAIGE_BACKEND": "referense"}, []),
        "misspelt": ({"BAIGE_BACKENDS": "reference"}, []),
        "chip": ({}, [chip]),
        "chip by name": ({"BAIGE_BACKEND": "acme"}, [chip]),
        "chip of its own kind": ({"BAIGE_BACKEND": "acme"}, [host_tensor_backend(folder, torch_device="npu")]),
        "broken, hardware": ({}, [host_tensor_backend(folder, broken=True)]),
        "broken, no hardware": ({}, [host_tensor_backend(folder, broken=True, hardware=False)]),
        "two, reference": ({"BAIGE_BACKEND": "reference"}, [other]),
        "two, ours allowed": ({"BAIGE_BACKEND": "reference", "VLLM_PLUGINS": "baige,baige_mounts"}, [other]),
        "two, chip": ({}, [chip, other]),
        "two, auto": ({}, [other]),
        "old, reference": ({"BAIGE_BACKEND": "reference"}, [distribution(folder, "vllm", "0.29.1")]),
        "new, auto": ({}, [distribution(folder, "vllm", "0.34.0")]),
        "development build": ({"BAIGE_BACKEND": "reference"}, [distribution(folder, "vllm", "0.33.1.dev7+cu129")]),
    }
    asked = [{"environment": environment, "paths": paths} for environment, paths in cases.values()]
    done = run("plugins", stdin=json.dumps(asked))
    assert len(done.answers) == len(cases), done.log[-6000:]
    return dict(zip(cases, done.answers, strict=True))


def test_off_imports_nothing_but_the_entry_point(found: dict[str, dict[str, Any]]) -> None:
    assert found["off"]["error"] == ""
    assert found["off"]["names"] == []
    stub = ["baige_device", "baige_device._version", "baige_device.engines", "baige_device.engines.entry"]
    assert found["off"]["ours"] == stub


def test_off_by_the_file_mounts_nothing_whatever_the_version(found: dict[str, dict[str, Any]]) -> None:
    assert found["off by file"]["error"] == ""
    assert found["off by file"]["platform"] == NOBODY
    assert found["off by file"]["names"] == []


@pytest.mark.parametrize("case", ["auto", "cuda", "broken, no hardware"])
def test_without_a_chip_of_ours_only_the_names_are_there(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] == ""
    assert found[case]["platform"] == NOBODY
    assert found[case]["names"] == NAMES
    assert "baige_device.engines.vllm.platform" not in found[case]["ours"]


@pytest.mark.parametrize("case", ["reference", "chip", "chip by name", "two, ours allowed", "development build"])
def test_platform_is_ours(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] == ""
    assert found[case]["platform"] == OURS
    assert found[case]["names"] == NAMES


@pytest.mark.parametrize("case", ["two, chip", "two, auto"])
def test_platform_is_left_to_the_other_plugin(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] == ""
    assert found[case]["platform"] == NOBODY  # what the other plugin answered
    assert found[case]["names"] == NAMES


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ("MountError", "'referense'", "did you mean 'reference'")),
        ("misspelt", ("BAIGE_BACKENDS", "did you mean BAIGE_BACKEND")),
        ("broken, hardware", ("'acme'", "libacme.so", "its hardware is in this machine", "BAIGE_BACKEND=off")),
        ("two, reference", ("baige (baige-device", "other (otherchip)", "VLLM_PLUGINS", "BAIGE_BACKEND=off")),
        ("old, reference", ("found version 0.29.1", "accepted >=0.30,<0.34")),
        ("chip of its own kind", ("'acme'", "'npu'", "platform plugin")),
    ],
)
def test_what_stops_the_start(found: dict[str, dict[str, Any]], case: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in found[case]["error"]


def test_outside_the_window_an_unasked_mount_stays_away(found: dict[str, dict[str, Any]]) -> None:
    assert found["new, auto"]["error"] == ""
    assert found["new, auto"]["names"] == []


def test_asking_for_the_platform_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from baige_device.engines.entry import vllm_platform as ask; answer = {ask(), ask()}; "
        f"assert answer == {{{OURS!r}}}, answer; "
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment({"BAIGE_BACKEND": "reference"}), cwd=ROOT, check=True)
