"""Who provides SGLang's platform, and that every reason against it is loud (user-demand cases A1, A2, A3, A5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baige_device.engines.sglang.ledger import LEDGER
from tests.engines.fakes import distribution, host_tensor_backend
from tests.engines.sglang.engine import ROOT, environment, run

OURS = "baige_device.engines.sglang.platform.BaigePlatform"
NOBODY = "sglang.srt.platforms.interface.SRTPlatform"
SCHEDULER_TARGET = "sglang.srt.managers.scheduler:Scheduler.get_internal_state"


def other_platform(folder: Path) -> str:
    return distribution(
        folder,
        "otherchip",
        entry_points="[sglang.srt.platforms]\nother = other_chip:platform\n",
        modules={
            "other_chip": "from sglang.srt.platforms.interface import SRTPlatform as Other\n\n\n"
            "def platform():\n    return 'other_chip:Other'\n"
        },
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sites")
    other = other_platform(folder)
    chip = host_tensor_backend(folder)
    off = folder / "off.toml"
    off.write_text('backend = "off"\n')
    reference = {"BAIGE_BACKEND": "reference"}
    cases: dict[str, tuple[dict[str, str], list[str], str]] = {
        "off by file": ({"BAIGE_CONFIG": str(off)}, [distribution(folder, "sglang", "0.6.1")], ""),
        "auto": ({}, [], ""),
        "reference": ({**reference, "BAIGE_CHECKS": "values"}, [], ""),
        "reference without moe": ({**reference, "BAIGE_OPS": "moe_dispatch=off"}, [], ""),
        "cuda": ({"BAIGE_BACKEND": "cuda"}, [], ""),
        "unknown": ({"BAIGE_BACKEND": "referense"}, [], ""),
        "misspelt": ({"BAIGE_BACKENDS": "reference"}, [], ""),
        "chip": ({}, [chip], ""),
        "chip by name": ({"BAIGE_BACKEND": "acme"}, [chip], ""),
        "broken, hardware": ({}, [host_tensor_backend(folder, broken=True)], ""),
        "broken, no hardware": ({}, [host_tensor_backend(folder, broken=True, hardware=False)], ""),
        "two, reference": (reference, [other], ""),
        "two, ours named": ({**reference, "SGLANG_PLATFORM": "baige"}, [other], ""),
        "two, other named": ({**reference, "SGLANG_PLATFORM": "other"}, [other], ""),
        "two, chip": ({}, [chip, other], ""),
        "two, auto": ({}, [other], ""),
        "ours named, auto": ({"SGLANG_PLATFORM": "baige"}, [], ""),
        "old, reference": (reference, [distribution(folder, "sglang", "0.5.21")], ""),
        "new, auto": ({}, [distribution(folder, "sglang", "0.6.0")], ""),
        "development build": (reference, [distribution(folder, "sglang", "0.5.23.dev7+cu129")], ""),
        "missing target": (reference, [], SCHEDULER_TARGET),
    }
    asked = [
        {"environment": environment, "paths": paths, "remove": remove} for environment, paths, remove in cases.values()
    ]
    done = run("plugins", stdin=json.dumps(asked), BAIGE_BACKEND="off")
    assert len(done.answers) == len(cases) + 1, done.log[-6000:]
    return dict(zip(["off", *cases], done.answers, strict=True))


def test_off_imports_nothing_but_the_entry_point(found: dict[str, dict[str, Any]]) -> None:
    package = ["baige_device", "baige_device._version"]
    assert found["off"]["ours"] == [*package, "baige_device.engines", "baige_device.engines.entry"]


def test_off_by_the_file_mounts_nothing_whatever_the_version(found: dict[str, dict[str, Any]]) -> None:
    assert found["off by file"]["error"] == ""
    assert found["off by file"]["platform"] == NOBODY
    assert found["off by file"]["applied"] == []


@pytest.mark.parametrize("case", ["auto", "cuda", "broken, no hardware"])
def test_without_a_chip_of_ours_only_the_name_is_there(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] == ""
    assert found[case]["platform"] == NOBODY
    assert found[case]["attention"]
    assert not found[case]["dsa_is_ours"]
    assert found[case]["applied"] == rows("names")


@pytest.mark.parametrize("case", ["reference", "chip", "chip by name", "two, ours named", "development build"])
def test_platform_is_ours(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] == ""
    assert found[case]["platform"] == OURS
    assert found[case]["dsa_is_ours"]
    assert found[case]["applied"] == rows("names", "platform", "cpu", "moe", "hisparse", "hisparse_cpu")


def test_moe_can_be_left_to_the_host(found: dict[str, dict[str, Any]]) -> None:
    assert found["reference without moe"]["error"] == ""
    assert found["reference without moe"]["applied"] == rows("names", "platform", "cpu", "hisparse", "hisparse_cpu")


def test_every_target_exists_in_the_installed_host(found: dict[str, dict[str, Any]]) -> None:
    states = found["reference"]["states"]
    assert [state["target"] for state in states] == [row.target for row in LEDGER.rows]
    assert [state["error"] for state in states if not state["exists"]] == []


def test_every_patch_says_when_it_can_go() -> None:
    assert [row.target for row in LEDGER.rows if row.kind == "patch" and not row.remove_when] == []


def test_worker_notices_that_the_general_plugin_failed(found: dict[str, dict[str, Any]]) -> None:
    assert "sglang: not mounted: " in found["reference"]["verified"]
    assert "ModelRunner.load_model" in found["reference"]["verified"]


@pytest.mark.parametrize("case", ["two, chip", "two, auto", "two, other named"])
def test_platform_is_left_to_the_other_plugin(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["error"] == ""
    assert found[case]["platform"] == NOBODY  # what the other plugin answered
    assert not found[case]["dsa_is_ours"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ("BackendError", "'referense'", "did you mean 'reference'")),
        ("misspelt", ("SettingsError", "BAIGE_BACKENDS", "did you mean BAIGE_BACKEND")),
        ("broken, hardware", ("'acme'", "libacme.so", "its hardware is in this machine", "BAIGE_BACKEND=off")),
        ("two, reference", ("'baige' (baige-device", "'other' (otherchip)", "SGLANG_PLATFORM", "BAIGE_BACKEND=off")),
        ("ours named, auto", ("SGLANG_PLATFORM=baige", "BAIGE_BACKEND=reference")),
        ("old, reference", ("MountError", "found version 0.5.21", "accepted >=0.5.22,<0.6")),
        ("missing target", (f"patch target {SCHEDULER_TARGET} is missing", "row window >=0.5.22,<0.6")),
    ],
)
def test_what_stops_the_start(found: dict[str, dict[str, Any]], case: str, words: tuple[str, ...]) -> None:
    assert found[case]["error"].startswith("SystemExit: baige-device: ")
    for word in words:
        assert word in found[case]["error"]


def test_outside_the_window_an_unasked_mount_stays_away(found: dict[str, dict[str, Any]]) -> None:
    assert found["new, auto"]["error"] == ""
    assert found["new, auto"]["applied"] == []
    assert not found["new, auto"]["attention"]


def test_asking_for_the_platform_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from baige_device.engines.entry import sglang_platform as ask; answer = {ask(), ask()}; "
        "assert answer == {'baige_device.engines.sglang.platform:BaigePlatform'}, answer; "
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment({"BAIGE_BACKEND": "reference"}), cwd=ROOT, check=True)


def rows(*features: str) -> list[str]:
    return sorted(row.target for row in LEDGER.rows if row.feature in features)
