"""vLLM on the Kunlun emulator: exact tokens through the vendor's kernels, grammars, and another platform beside us."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines import kunlun_models
from tests.engines.emulated import SITE, kunlun
from tests.engines.fakes import distribution
from tests.engines.tiny_models import expected_cases, model_path
from tests.engines.vllm.engine import ROOT, environment, run
from tests.engines.vllm.fake_host import PLATFORM, WORKER

BITMASK = "xgrammar:apply_token_bitmask_inplace"
MOE = {"moe_dispatch": "tuned", "moe_expert_ffn": "tuned", "moe_combine": "tuned"}


def generate(model: Path, options: dict[str, Any], *arguments: str, **settings: str) -> dict[str, Any]:
    options = {"dtype": "float16", **options}
    return run("generate", str(model), "--options", json.dumps(options), *arguments, **settings).answer


def called(report: dict[str, Any]) -> dict[str, str]:
    """Tier of each op that ran; every one is Kunlun's."""
    ops = {op: report["record"]["ops"][op] for op, calls in report["calls"].items() if calls}
    assert {entry["backend"] for entry in ops.values()} == {"kunlun"}
    return {op: entry["tier"] for op, entry in ops.items()}


def test_mla_and_moe_model_is_exact() -> None:
    model = kunlun_models.model_path("deepseek_v3")
    answer = generate(model, {}, **kunlun())
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)]
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged": "tuned", "kv_write": "tuned", **MOE}
    assert report["record"]["device"] == "Kunlun emulator"
    assert report["record"]["reason"] == "named by BAIGE_BACKEND: torch_xmlir is the test emulator, no hardware"
    assert answer["vendor_calls"]["fwd_kvcache_mla"] > 0
    assert answer["vendor_calls"]["moe_fc"] == 2 * report["calls"]["moe_expert_ffn"]


def test_dsa_model_is_exact() -> None:
    model = kunlun_models.model_path("deepseek_v32")
    answer = generate(model, {}, **kunlun(backend="auto"))
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)]
    assert max(len(case["prompt"]) for case in expected_cases(model)) > 2 * 128  # index_topk
    (report,) = answer["reports"]
    # Index keys are 16-bit: the vendor's indexer kernels take int8 keys only.
    assert called(report) == {"sparse_attention": "tuned", "index_topk": "portable", "kv_write": "tuned", **MOE}
    assert report["record"]["reason"] == "the chip present: torch_xmlir is the test emulator, no hardware"
    assert answer["vendor_calls"]["fwd_kvcache_mla"] > 0


def test_a_grammar_is_kept_without_a_compiled_kernel() -> None:
    model = model_path("smollm2")
    answer = run("structured", str(model), "(red|green) [0-9]{3}", **kunlun()).answer
    constrained, free = answer["texts"]
    assert re.fullmatch("(red|green) [0-9]{3}", constrained), constrained
    assert answer["tokens"][1] == expected_cases(model)[1]["output"][:8], free
    (report,) = answer["reports"]
    assert BITMASK in report["mounted"]
    assert called(report) == {"attend_paged": "tuned", "kv_write": "tuned"}


def vllm_kunlun(folder: Path) -> str:
    """A distribution like vllm-kunlun: an active platform plugin `kunlun` of somebody else."""
    return distribution(
        folder,
        "vllm-kunlun",
        entry_points="[vllm.platform_plugins]\nkunlun = vllm_kunlun:register\n",
        modules={
            "vllm_kunlun": "def register():\n    return 'vendor_platform.VendorPlatform'\n",
            "vendor_platform": PLATFORM,
            "vendor_worker": WORKER,
        },
    )


def test_beside_another_kunlun_platform_we_are_a_general_plugin(tmp_path: Path) -> None:
    settings = kunlun(vllm_kunlun(tmp_path))
    model = model_path("smollm2")
    answer = generate(model, {"attention_backend": "BAIGE"}, "--cases", "2", **settings)
    assert answer["tokens"] == [case["output"] for case in expected_cases(model)[:2]]
    (report,) = answer["reports"]
    assert called(report) == {"attend_paged": "tuned", "kv_write": "tuned"}
    assert report["mounted"] == [
        "vllm.v1.attention.backends.registry:register_backend",
        "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel",  # the borrowed runner's
    ]
    assert doctor(settings) == "kunlun (vllm-kunlun); baige-device mounts through the general plugin only"


def test_who_provides_the_platform(tmp_path: Path) -> None:
    chip, other = str(SITE), vllm_kunlun(tmp_path)
    ours = {"VLLM_PLUGINS": "baige,baige_mounts"}
    cases: list[tuple[dict[str, str], list[str]]] = [
        ({"BAIGE_BACKEND": "kunlun"}, [chip]),
        ({}, [chip]),
        ({"BAIGE_BACKEND": "kunlun", **ours}, [chip, other]),
        ({"BAIGE_BACKEND": "kunlun"}, []),
    ]
    asked = [{"environment": environment, "paths": paths} for environment, paths in cases]
    *given, absent = run("plugins", stdin=json.dumps(asked)).answers
    assert [answer["error"] for answer in given] == ["", "", ""]
    assert {answer["platform"] for answer in given} == {"baige_device.engines.vllm.platform.BaigePlatform"}
    assert "backend 'kunlun' (built-in) was asked for (BAIGE_BACKEND=kunlun) and is not usable" in absent["error"]
    assert "torch_xmlir is not installed" in absent["error"]


def test_doctor_names_our_platform_when_we_are_alone() -> None:
    assert doctor(kunlun()) == "baige-device (baige_device.engines.vllm.platform.BaigePlatform)"


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
    platform: str = next(item["platform"] for item in found["engines"] if item["name"] == "vllm")
    return platform


def one_chip(folder: Path) -> dict[str, str]:
    """Environment of a machine with one Kunlun chip: vLLM asks about models in processes of their own, at times."""
    nodes = folder / "dev"
    nodes.mkdir()
    for name in ("xpu0", "xpuctrl"):
        (nodes / name).touch()
    start = f"""
from functools import partial
from pathlib import Path

from baige_device.backends.kunlun import probe

probe.probe = partial(probe.probe, Path({os.fspath(nodes)!r}))
"""
    site = distribution(folder, "xpytorch", modules={"torch_xmlir": "", "sitecustomize": start})
    return {"BAIGE_BACKEND": "kunlun", "PYTHONPATH": os.pathsep.join([site, os.fspath(ROOT)])}


def test_where_a_chip_is_the_platform_is_for_its_tensors(tmp_path: Path) -> None:
    fresh = {"VLLM_CACHE_ROOT": os.fspath(tmp_path / "cache")}  # a filled one answers about models, too
    answer = run("chip", new_interpreter=True, **one_chip(tmp_path), **fresh).answer
    assert answer == {
        "platform": "baige_device.engines.vllm.chip.ChipPlatform",
        "device_type": "cuda",
        "dispatch_key": "CUDA",
        "dist_backend": "nccl",
        "is_cuda": False,
        "device": "cuda",
        "worker": "baige_device.engines.vllm.chip_worker.ChipWorker",
        "worker_bases": ["Rank", "Worker"],
        "communicator": "baige_device.engines.vllm.communicator.ChipCommunicator",
        "eager": True,
    }
