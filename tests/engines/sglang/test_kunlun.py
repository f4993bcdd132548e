"""SGLang on the Kunlun emulator: exact tokens through the vendor's kernels, grammars, another platform beside us."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from baige_device.engines.sglang.ledger import LEDGER
from tests.engines import kunlun_models
from tests.engines.emulated import SITE, kunlun
from tests.engines.fakes import distribution
from tests.engines.sglang.engine import ROOT, environment, run
from tests.engines.sglang.fake_host import PLATFORM, PLUGIN
from tests.engines.tiny_models import expected_cases, model_path

MOE = {"moe_dispatch": "tuned", "moe_expert_ffn": "tuned", "moe_combine": "tuned"}
PAGE_TOKENS = 64


def generate(model: Path, options: dict[str, Any], **settings: str) -> dict[str, Any]:
    return run("generate", str(model), json.dumps({"dtype": "float16", **options}), **settings).answer


def called(report: dict[str, Any]) -> dict[str, str]:
    """Tier of each op that ran; every one is Kunlun's."""
    ops = {op: report["record"]["ops"][op] for op, calls in report["calls"].items() if calls}
    assert {entry["backend"] for entry in ops.values()} == {"kunlun"}
    return {op: entry["tier"] for op, entry in ops.items()}


def test_mla_and_moe_model_is_exact() -> None:
    model = kunlun_models.model_path("deepseek_v3")
    answer = generate(model, {}, **kunlun())
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)]
    assert answer["attention_backend"] == "baige"
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged": "tuned", "kv_write": "tuned", **MOE}
    assert report["record"]["device"] == "Kunlun emulator"
    stem = max(len(case["prompt"]) for case in expected_cases(model)[:-1])
    assert answer["cached"][-1] == stem // PAGE_TOKENS * PAGE_TOKENS  # whole pages of the chip's size


def test_dsa_model_is_exact() -> None:
    model = kunlun_models.model_path("deepseek_v32")
    answer = generate(model, {}, **kunlun(backend="auto"))
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)]
    assert max(len(case["prompt"]) for case in expected_cases(model)) > 2 * 128  # index_topk
    assert answer["attention_backend"] == "dsa"
    (report,) = answer["reports"]
    # Index keys are 16-bit: the vendor's indexer kernels take int8 keys only.
    assert called(report) == {"sparse_attention": "tuned", "index_topk": "portable", "kv_write": "tuned", **MOE}
    assert report["record"]["reason"] == "the chip present: torch_xmlir is the test emulator, no hardware"


def test_a_grammar_is_kept_without_a_compiled_kernel() -> None:
    answer = run("structured", str(model_path("smollm2")), "(red|green) [0-9]{3}", **kunlun()).answer
    constrained, free = answer["texts"]
    assert re.fullmatch("(red|green) [0-9]{3}", constrained), constrained
    assert answer["tokens"][1] == expected_cases(model_path("smollm2"))[1]["output"][:8], free
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged": "tuned", "kv_write": "tuned"}


def sglang_kunlun(folder: Path) -> str:
    """A distribution like sglang-kunlun: an active platform plugin `kunlun` of somebody else."""
    return distribution(
        folder,
        "sglang-kunlun",
        entry_points="[sglang.srt.platforms]\nkunlun = vendor_plugin:platform\n"
        "[sglang.srt.plugins]\nkunlun_hooks = vendor_plugin:show_the_activation\n",
        modules={"vendor_plugin": PLUGIN, "vendor_platform": PLATFORM},
    )


def test_beside_another_kunlun_platform_we_are_a_general_plugin(tmp_path: Path) -> None:
    settings = kunlun(sglang_kunlun(tmp_path))
    model = kunlun_models.model_path("deepseek_v3")
    answer = generate(model, {"attention_backend": "baige"}, **settings)
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)]
    assert answer["attention_backend"] == "baige"
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged": "tuned", "kv_write": "tuned"}  # experts are the host's
    assert doctor(settings) == "'kunlun' (sglang-kunlun); baige-device mounts through the general plugin only"


def test_who_provides_the_platform(tmp_path: Path) -> None:
    chip, other = str(SITE), sglang_kunlun(tmp_path)
    cases: list[tuple[dict[str, str], list[str]]] = [
        ({"BAIGE_BACKEND": "kunlun"}, [chip]),
        ({}, [chip]),
        ({"BAIGE_BACKEND": "kunlun", "SGLANG_PLATFORM": "baige"}, [chip, other]),
        ({"BAIGE_BACKEND": "kunlun"}, [chip, other]),
        ({"BAIGE_BACKEND": "kunlun"}, []),
    ]
    asked = [{"environment": environment, "paths": paths, "remove": ""} for environment, paths in cases]
    _, *given, beside, absent = run("plugins", stdin=json.dumps(asked), BAIGE_BACKEND="off").answers
    rows = {row.target for row in LEDGER.rows if row.feature == "grammar"}
    for answer in given:
        assert answer["error"] == ""
        assert answer["platform"] == "baige_device.engines.sglang.platform.BaigePlatform"
        assert rows <= set(answer["applied"])
    assert beside["error"] == ""
    assert beside["platform"] == "vendor_platform.VendorPlatform"
    assert beside["applied"] == sorted(row.target for row in LEDGER.rows if row.feature == "names")
    assert "backend 'kunlun' (built-in) was asked for (BAIGE_BACKEND=kunlun) and is not usable" in absent["error"]


def test_doctor_names_our_platform_when_we_are_alone() -> None:
    assert doctor(kunlun()) == "baige-device (baige_device.engines.sglang.platform:BaigePlatform)"


def doctor(settings: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "baige_device.cli", "doctor", "--json", "--no-mounts"],
        cwd=ROOT,
        env=environment(settings),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["chosen"] == "kunlun"
    assert found["problems"] == []
    platform: str = next(item["platform"] for item in found["engines"] if item["name"] == "sglang")
    return platform
