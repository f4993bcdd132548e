"""Pack vLLM 0.33 for a GPU machine without a network: CPython 3.12, torch 2.11+cu130, transformers and nvcc are there.

    python benchmarks/pack_vllm.py OUT_FOLDER [--parts 3]

Writes `part-0`, `part-1`, ... (together about 150 MB) and `unpack.sh`, which on that machine, with the parts beside it,
makes `/tmp/vllm_site` (vLLM) and `/tmp/site` (the packages that it needs and the entry points of this checkout). Then

    PYTHONPATH=$PWD:/tmp/vllm_site:/tmp/site python benchmarks/vllm_hisparse.py ours --cases 8x20000

vLLM's wheel pins torch 2.14; its compiled libraries use the stable ABI and load under 2.11. Left out, since sparse MLA
decode does not reach it: FlashAttention's libraries, FlashInfer, and a CuTe kernel for capability 10.
"""

from __future__ import annotations

import argparse
import configparser
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import tomllib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baige_device._version import __version__

GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34", "2_35")
LEFT_OUT_FOLDERS = {"vllm-rs", "fmha_sm100", "tml_fa4", "static", "swagger"}
LEFT_OUT_FILES = {"_vllm_fa2_C.abi3.so", "_vllm_fa3_C.abi3.so", "_qutlass_C.abi3.so", "vllm-rs"}
STAND_INS = {
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": '"""FlashAttention is not packed."""\n',
    "vllm/models/deepseek_v32/nvidia/ops/fused_q_cutedsl.py": (
        '"""The CuTe kernel needs capability 10; below it this says no."""\n\n\n'
        "def is_fused_q_cutedsl_supported(*args, **kwargs):\n    return False\n\n\n"
        "def fused_q_cutedsl(*args, **kwargs):\n    raise NotImplementedError\n"
    ),
}
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "benchmarks" / "vllm_packages.txt"


def download(folder: Path) -> None:
    """Wheels for CPython 3.12 on Linux x86-64."""
    platforms = [f"manylinux_{glibc}_x86_64" for glibc in GLIBC] + ["manylinux1_x86_64", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, "-r", str(PACKAGES)], check=True)


def unzip(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)


def describe_checkout(site: Path) -> None:
    """What the engine looks up to find this checkout's plugins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = site / f"baige_device-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: baige-device\nVersion: {__version__}\n")
    groups = configparser.ConfigParser()
    groups.optionxform = str  # type: ignore[assignment,method-assign]
    groups.read_dict(project["entry-points"])
    with (info / "entry_points.txt").open("w") as file:
        groups.write(file)


def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    path = Path(member.name)
    folders = LEFT_OUT_FOLDERS if path.parts[0] == "vllm_site" else set()
    if folders & set(path.parts) or path.name in LEFT_OUT_FILES or "__pycache__" in path.parts:
        return None
    return member


def split(archive: Path, folder: Path, parts: int) -> None:
    size = -(-archive.stat().st_size // parts)
    with archive.open("rb") as file:
        for number in range(parts):
            (folder / f"part-{number}").write_bytes(file.read(size))
    names = " ".join(f"part-{number}" for number in range(parts))
    (folder / "unpack.sh").write_text(f'cd "$(dirname "$0")" && cat {names} | tar xJ -C /tmp\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        download(work / "wheels")
        for wheel in sorted((work / "wheels").glob("*.whl")):
            unzip(wheel, work / ("vllm_site" if wheel.name.startswith("vllm-") else "site"))
        for name, text in STAND_INS.items():
            (work / "vllm_site" / name).write_text(text)
        describe_checkout(work / "site")
        with tarfile.open(work / "all.tar.xz", "w:xz", preset=3) as archive:
            for name in ("vllm_site", "site"):
                archive.add(work / name, name, filter=kept)
        split(work / "all.tar.xz", args.folder, args.parts)


if __name__ == "__main__":
    main()
